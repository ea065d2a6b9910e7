"""How many bytes a stage takes on one device under 1F1B.

Every device of a stage holds the parameters, gradients and optimizer state of all the stage's layers; its
devices split each microbatch by rows, so activations shrink with their number and the rest does not.
A stage with a stages behind it keeps the activations of at most a + 1 microbatches alive (its warm-up runs
a forwards ahead of the first backward), and never more than there are.

With ZeRO-1 the owners of a layer, one in each pipeline, share out its optimizer state. A plan has f + 1
pipelines or more (``templates.costs_for``), so a device is reckoned to keep one part of f + 1.
"""

import numpy as np
from numpy.typing import NDArray

from planner.stages.layers import rows_on_one
from planner.values import ModelProfile, Policy, StageTemplate

Sizes = NDArray[np.int64]


def in_flight(stages_after: int, microbatches: int) -> int:
    """Microbatches whose activations are alive at once on a stage with ``stages_after`` behind it (1F1B)."""
    return min(stages_after + 1, microbatches)


class MemoryModel:
    """Bytes per device of any stage [u, v) of one model.

    A pipeline's share of the batch is not known when its template is made, so the microbatches in flight are
    bounded by all microbatches of a step: a lone last pipeline really runs them all.

    With ``checkpoint_activations`` what stays alive between forward and backward is the *input* of each
    layer; the inside of a layer is recomputed, so of one layer, the largest, everything is alive at a time.
    """

    def __init__(self, profile: ModelProfile, policy: Policy) -> None:
        layers = profile.layers
        self._rows = policy.microbatch_rows
        self._measured_rows = profile.microbatch_rows
        self._microbatches = policy.microbatches
        self.limit_bytes = (
            profile.device_memory_bytes if policy.device_memory_bytes is None else policy.device_memory_bytes
        )
        """Memory of one device, or ``None`` for no limit."""
        owners = policy.tolerate + 1 if policy.zero1 else 1
        self._state = _range_sums(
            [
                layer.parameter_bytes + layer.gradient_bytes - (-layer.optimizer_bytes // owners)
                for layer in layers
            ]
        )
        activations = [layer.activation_bytes for layer in layers]
        if policy.checkpoint_activations:
            # The first layer's input is the batch itself: integers or pixels, owned by the data loader.
            inputs = [0] + [layer.output_bytes for layer in layers[:-1]]
            self._kept, self._working = _range_sums(inputs), _range_maxima(activations)
        else:
            self._kept, self._working = _range_sums(activations), np.zeros_like(self._state)

    def table(self, devices: int, stages_after: int) -> Sizes:
        """Bytes of every stage [u, v), shape (L + 1, L + 1); meaningless where v ≤ u."""
        alive = in_flight(stages_after, self._microbatches)
        share = rows_on_one(devices, self._rows)
        per_share = self._kept * alive + self._working
        return self._state - (-per_share * share // self._measured_rows)

    def stage_bytes(self, first_layer: int, end_layer: int, devices: int, stages_after: int) -> int:
        alive = in_flight(stages_after, self._microbatches)
        share = rows_on_one(devices, self._rows)
        cell = first_layer, end_layer
        per_share = int(self._kept[cell]) * alive + int(self._working[cell])
        return int(self._state[cell]) + -(-per_share * share // self._measured_rows)

    def template_bytes(self, stages: tuple[StageTemplate, ...]) -> tuple[int, ...]:
        """Bytes per device of each stage of a template."""
        return tuple(
            self.stage_bytes(stage.first_layer, stage.end_layer, stage.devices, len(stages) - 1 - position)
            for position, stage in enumerate(stages)
        )


def _range_sums(values: list[int]) -> Sizes:
    """Sum of values[u:v] at [u, v]."""
    prefix = np.concatenate(([0], np.cumsum(np.array(values, dtype=np.int64))))
    sums: Sizes = prefix[None, :] - prefix[:, None]
    return sums


def _range_maxima(values: list[int]) -> Sizes:
    """Largest of values[u:v] at [u, v]; 0 where v ≤ u."""
    maxima = np.zeros((len(values) + 1, len(values) + 1), dtype=np.int64)
    for first in range(len(values)):
        maxima[first, first + 1 :] = np.maximum.accumulate(np.array(values[first:], dtype=np.int64))
    return maxima
