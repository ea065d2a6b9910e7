"""How many bytes a stage takes on one device under 1F1B.

Every device of a stage holds the parameters, gradients and optimizer state of all the stage's layers; its
devices split each microbatch by rows, so activations shrink with their number and the rest does not.
A stage with a stages after it keeps the activations of at most a + 1 microbatches alive (its warm-up runs
a forwards ahead of the first backward), and never more than there are.

With ZeRO-1 the owners of a layer, one in each pipeline, share out its optimizer state. A plan has f + 1
pipelines or more (``templates.costs_for``), so a device is reckoned to keep one part of f + 1.
"""

import numpy as np
from numpy.typing import NDArray

from planner.stages.layers import rows_on_one
from planner.values import LayerProfile, ModelProfile, Policy, Recompute, StageTemplate

Sizes = NDArray[np.int64]


def in_flight(stages_after: int, microbatches: int) -> int:
    """Return how many microbatches' activations are alive at once on a stage with ``stages_after`` after it
    (1F1B)."""
    return min(stages_after + 1, microbatches)


class MemoryModel:
    """Bytes per device of any stage [u, v) of one model, under each way to recompute.

    A pipeline's share of the batch is not known when its template is made, so the microbatches in flight are
    bounded by all microbatches of a step: a lone last pipeline really runs them all.

    With recomputation only a part of each layer's activations stays alive between forward and backward: its
    *input* (``full``), or that and the outputs of its matrix products and attention (``selective``). The rest
    is computed again layer by layer, so of one layer, the largest, everything is alive at a time.
    """

    def __init__(self, profile: ModelProfile, policy: Policy) -> None:
        self._layers = profile.layers
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
                for layer in profile.layers
            ]
        )
        self._activations: dict[tuple[Recompute, int], tuple[Sizes, Sizes]] = {}

    def _kept_and_working(self, recompute: Recompute, devices: int) -> tuple[Sizes, Sizes]:
        """Return what stays alive for each microbatch in flight, and what is computed again at a time.

        Both are bytes on the fullest of ``devices`` devices times the rows that were measured.
        """
        known = self._activations.get((recompute, devices))
        if known is None:
            known = self._activations[recompute, devices] = self._summed(recompute, devices)
        return known

    def _summed(self, recompute: Recompute, devices: int) -> tuple[Sizes, Sizes]:
        layers = self._layers
        before = [0, *(layer.output_bytes for layer in layers[:-1])]
        if recompute == "none":
            return self._sums([layer.activation_bytes for layer in layers], devices), np.zeros_like(
                self._state
            )
        if recompute == "full":
            # The first layer's input is the batch itself: integers or pixels, owned by the data loader.
            kept = [
                size if layer.full is None else layer.full.activation_bytes
                for layer, size in zip(layers, before, strict=True)
            ]
        else:
            kept = [layer.selective.activation_bytes for layer in layers if layer.selective is not None]
        working = [_again_bytes(layer, size) for layer, size in zip(layers, before, strict=True)]
        return self._sums(kept, devices), _range_maxima(self._scaled(working, devices))

    def _sums(self, sizes: list[int], devices: int) -> Sizes:
        return _range_sums(self._scaled(sizes, devices))

    def _scaled(self, sizes: list[int], devices: int) -> list[int]:
        """Return the sizes of layers on the fullest of ``devices`` devices, times the rows that were measured."""
        share = rows_on_one(devices, self._rows)
        return [
            size * share if part is None else -(-size * part * self._rows // layer.activation_bytes)
            for layer, size in zip(self._layers, sizes, strict=True)
            for part in [_part_bytes(layer, devices)]
        ]

    def table(self, devices: int, stages_after: int, recompute: Recompute) -> Sizes:
        """Return the bytes of every stage [u, v), shape (L + 1, L + 1); meaningless where v ≤ u."""
        alive = in_flight(stages_after, self._microbatches)
        kept, working = self._kept_and_working(recompute, devices)
        return self._state - (-(kept * alive + working) // self._measured_rows)

    def stage_bytes(
        self, first_layer: int, end_layer: int, devices: int, stages_after: int, recompute: Recompute
    ) -> int:
        """Return the bytes of stage [first_layer, end_layer) on each of its devices."""
        alive = in_flight(stages_after, self._microbatches)
        cell = first_layer, end_layer
        kept, working = self._kept_and_working(recompute, devices)
        activations = int(kept[cell]) * alive + int(working[cell])
        return int(self._state[cell]) + -(-activations // self._measured_rows)

    def template_bytes(self, stages: tuple[StageTemplate, ...]) -> tuple[int, ...]:
        """Return the bytes per device of each stage of a template."""
        return tuple(
            self.stage_bytes(
                stage.first_layer,
                stage.end_layer,
                stage.devices,
                len(stages) - 1 - position,
                stage.recompute,
            )
            for position, stage in enumerate(stages)
        )


def _part_bytes(layer: LayerProfile, devices: int) -> int | None:
    """Return what autograd was measured to keep on the fullest of ``devices`` devices."""
    if not layer.activation_bytes:
        return None
    return next((split.activation_bytes for split in layer.split if split.devices == devices), None)


def _again_bytes(layer: LayerProfile, input_bytes: int) -> int:
    """Return what a layer has for its backward pass beside what it kept, once that is computed again.

    What it keeps under ``full`` are its inputs and what it computes outside of what is recomputed. An input
    may be among what autograd keeps, or not.
    """
    if layer.full is None:
        return layer.activation_bytes
    inside = max(layer.activation_bytes - layer.full.activation_bytes, 0)
    return min(inside + (input_bytes or layer.output_bytes), layer.activation_bytes)


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
