"""Bytes that a stage takes on one device under 1F1B.

The devices of a stage split each microbatch by rows, so activations shrink with their number. As replicas,
every device holds the parameters, gradients and optimizer state of all the stage's layers. As shards, each
of k devices holds a k-th of them and the buffers of the layer that is gathered at the time: twice the
parameters and once the gradients of the largest. Buffers are whole on every device.
Tensor-parallel devices hold a k-th, too, and columns of some weights with their gradients; they gather the
parameters that are not divided; and each has the activations of all rows, a part of which is divided. If
a tensor-parallel stage has r replicas, all of this holds for each group of k / r devices, with an r-th of the
rows. A stage with a stages after it keeps the activations of at most a + 1 microbatches alive (its warm-up runs a
forwards ahead of the first backward), and never more than there are. One layer computes at a time, so the
memory that a pass needs for a moment counts once, for the layer that needs most.

With ZeRO-1 the owners of a layer, one in each pipeline, divide its optimizer state among them. A plan has f
+ 1 pipelines or more (``templates.costs_for``), so a device is assumed to keep one part of f + 1, of its
shard where it has one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.stages.layers import divided_bytes, rows_on_one
from planner.values import LayerProfile, Mode, ModelProfile, Policy, Recompute, StageTemplate, Within

Sizes = NDArray[np.int64]


def in_flight(stages_after: int, microbatches: int) -> int:
    """Return how many microbatches' activations are alive at once on a stage with ``stages_after`` after it
    (1F1B)."""
    return min(stages_after + 1, microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of a stage on each of its devices, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Activations of all microbatches in flight, and of the layers that are recomputed at a time."""
    gathered: int
    """Parameters and gradients of the largest layer while its shards are gathered; 0 for replicas."""
    undivided: int = 0
    """Part of ``parameters`` that is whole on each device although the stage divides its state: buffers."""
    working: int
    """Gradients and values between operations of the layer that needs most of them while it is computed; a
    part of ``gathered`` for devices that hold parts.
    """

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.gathered + self.working


class MemoryModel:
    """Bytes per device of any stage [u, v) of one model, under each way to recompute, as replicas or shards.

    A pipeline's share of the batch is not known when its template is made, so the microbatches in flight
    are bounded by all microbatches of a step: a single remaining pipeline runs all of them.

    With recomputation only a part of each layer's activations stays alive between forward and backward: its
    *input* (``full``), or that and the outputs of its matrix products and attention (``selective``). The
    rest is computed again layer by layer, so all activations are alive for one layer at a time, at most the
    largest.
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
        self._owners = policy.tolerate + 1 if policy.zero1 else 1
        """Number of pipelines that divide the optimizer's state among them."""
        self._states: dict[tuple[int, Within], Sizes] = {}
        self._activations: dict[tuple[Recompute, int, int], tuple[Sizes, Sizes]] = {}

    def _state(self, devices: int, mode: Mode) -> Sizes:
        """Return the bytes on each device of parameters, gradients and optimizer state, and of the layer that
        needs most while it is computed.
        """
        parts = mode.parts(devices)
        within = "replicate" if parts == 1 else mode.within
        known = self._states.get((parts, within))
        if known is None:
            known = self._states[parts, within] = _range_sums(
                [sum(_state_bytes(layer, parts, self._owners, within)) for layer in self._layers]
            ) + _range_maxima([sum(self._momentary(layer, parts, within)) for layer in self._layers])
        return known

    def _momentary(self, layer: LayerProfile, parts: int, within: Within) -> tuple[int, int]:
        """Return the bytes that a layer needs on each device while it is computed: gathered, and working."""
        working = -(-layer.working_bytes * max(self._rows, self._measured_rows) // self._measured_rows)
        if parts == 1:
            return 0, working
        # What is gathered contains the whole layer's gradients, of which ``working`` contains the largest.
        gathered = _gathered_bytes(layer, within)
        return gathered, max(0, working - layer.gradient_bytes)

    def _kept_and_working(self, devices: int, mode: Mode) -> tuple[Sizes, Sizes]:
        """Return the activations that stay alive for each microbatch in flight, and those that are recomputed
        at a time.

        Both are bytes on the fullest of ``devices`` devices, multiplied by the number of measured rows.
        """
        tensor = mode.parts(devices) if mode.within == "tensor" else 1
        key = mode.recompute, devices // tensor, tensor
        known = self._activations.get(key)
        if known is None:
            known = self._activations[key] = self._summed(*key)
        return known

    def _summed(self, recompute: Recompute, among: int, tensor: int) -> tuple[Sizes, Sizes]:
        """Return ``_kept_and_working``.

        :param among: number of devices, or of replicas of ``tensor`` devices each, that split the rows.
        """
        layers = self._layers
        before = [0, *(layer.output_bytes for layer in layers[:-1])]
        if recompute == "none":
            kept = _range_sums(self._scaled([layer.activation_bytes for layer in layers], among, tensor))
            return kept, np.zeros_like(kept)
        if recompute == "full":
            # The first layer's input is the batch itself: integers or pixels, owned by the data loader.
            inputs = [
                size if layer.full is None else layer.full.activation_bytes
                for layer, size in zip(layers, before, strict=True)
            ]
        else:
            inputs = [layer.selective.activation_bytes for layer in layers if layer.selective is not None]
        working = [_again_bytes(layer, size) for layer, size in zip(layers, before, strict=True)]
        again = _range_maxima(self._scaled(working, among, tensor))
        # Inputs are not divided.
        return _range_sums(self._scaled(inputs, among, 1 if recompute == "full" else tensor)), again

    def _scaled(self, sizes: list[int], among: int, tensor: int) -> list[int]:
        """Return the sizes of layers on the device that has most, multiplied by the number of measured rows."""
        share = rows_on_one(among, self._rows)
        scaled = [
            size * share if part is None else -(-size * part * self._rows // layer.activation_bytes)
            for layer, size in zip(self._layers, sizes, strict=True)
            for part in [_part_bytes(layer, among)]
        ]
        if tensor == 1:
            return scaled
        return [
            -(-size * _tensor_bytes(layer, tensor) // max(layer.activation_bytes, 1))
            for layer, size in zip(self._layers, scaled, strict=True)
        ]

    def table(self, devices: int, stages_after: int, mode: Mode) -> Sizes:
        """Return the bytes of every stage [u, v), shape (L + 1, L + 1); meaningless where v ≤ u."""
        alive = in_flight(stages_after, self._microbatches)
        kept, working = self._kept_and_working(devices, mode)
        return self._state(devices, mode) - (-(kept * alive + working) // self._measured_rows)

    def stage_bytes(
        self, first_layer: int, end_layer: int, devices: int, stages_after: int, mode: Mode
    ) -> int:
        """Return the bytes of stage [first_layer, end_layer) on each of its devices."""
        alive = in_flight(stages_after, self._microbatches)
        cell = first_layer, end_layer
        kept, working = self._kept_and_working(devices, mode)
        activations = int(kept[cell]) * alive + int(working[cell])
        return int(self._state(devices, mode)[cell]) + -(-activations // self._measured_rows)

    def breakdown(
        self, first_layer: int, end_layer: int, devices: int, stages_after: int, mode: Mode
    ) -> StageMemory:
        """Return the bytes of ``stage_bytes`` by their purpose."""
        layers = self._layers[first_layer:end_layer]
        total = self.stage_bytes(first_layer, end_layer, devices, stages_after, mode)
        parts = mode.parts(devices)
        states = [_state_bytes(layer, parts, self._owners, mode.within) for layer in layers]
        parameters, gradients, optimizer = (sum(sizes) for sizes in zip(*states, strict=True))
        gathered, working = max((self._momentary(layer, parts, mode.within) for layer in layers), key=sum)
        return StageMemory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=total - parameters - gradients - optimizer - gathered - working,
            gathered=gathered,
            undivided=sum(layer.parameter_bytes - divided_bytes(layer) for layer in layers)
            if parts > 1
            else 0,
            working=working,
        )

    def template_bytes(self, stages: tuple[StageTemplate, ...]) -> tuple[int, ...]:
        """Return the bytes per device of each stage of a template."""
        return tuple(
            self.stage_bytes(
                stage.first_layer, stage.end_layer, stage.devices, len(stages) - 1 - position, stage.mode
            )
            for position, stage in enumerate(stages)
        )

    def fit(self, stages: tuple[StageTemplate, ...]) -> bool:
        """Return whether every stage of a template fits into the memory of its devices."""
        return self.limit_bytes is None or max(self.template_bytes(stages)) <= self.limit_bytes


def _state_bytes(layer: LayerProfile, parts: int, owners: int, within: Within) -> tuple[int, int, int]:
    """Return the bytes of the layer's parameters, gradients and optimizer state on one device.

    :param parts: devices among which they are divided, 1 for replicas.
    :param owners: pipelines that divide the optimizer's state among them.
    """
    divided = divided_bytes(layer)
    columns = (
        layer.tensor.column_bytes if within == "tensor" and parts > 1 and layer.tensor is not None else 0
    )
    return (
        layer.parameter_bytes - divided - (-divided // parts) - (-columns // parts),
        -(-layer.gradient_bytes // parts) - (-columns // parts),
        -(-layer.optimizer_bytes // (parts * owners)),
    )


def _gathered_bytes(layer: LayerProfile, within: Within) -> int:
    """Return the most bytes that gathering needs while a layer no larger than this one is computed on parts:
    its parameters, those of the layer that is gathered next, and its gradients before they are scattered.

    Under tensor parallelism only what is not divided counts, or the weights whose columns are copied.
    """
    if within != "tensor" or layer.tensor is None:
        return 2 * divided_bytes(layer) + layer.gradient_bytes
    whole = 2 * divided_bytes(layer) + layer.gradient_bytes - 3 * layer.tensor.parameter_bytes
    return max(whole, 2 * layer.tensor.column_bytes)


def _tensor_bytes(layer: LayerProfile, devices: int) -> int:
    """Return the bytes that autograd keeps on each of ``devices`` devices that compute parts of the layer on
    all rows.
    """
    split = min(layer.activation_bytes, 0 if layer.tensor is None else layer.tensor.activation_bytes)
    return layer.activation_bytes - split - (-split // devices)


def _part_bytes(layer: LayerProfile, devices: int) -> int | None:
    """Return the bytes that autograd was measured to keep on the fullest of ``devices`` devices, ``None`` if
    not measured.
    """
    if not layer.activation_bytes:
        return None
    return next((split.activation_bytes for split in layer.split if split.devices == devices), None)


def _again_bytes(layer: LayerProfile, input_bytes: int) -> int:
    """Return the bytes of activations that a layer recomputes for its backward pass, in addition to those it
    kept.

    Under ``full`` it keeps its inputs and what it computes outside of the recomputed part. An input may be
    among what autograd keeps, or not.
    """
    if layer.full is None:
        return layer.activation_bytes
    inside = max(layer.activation_bytes - layer.full.activation_bytes, 0)
    return min(inside + (input_bytes or layer.output_bytes), layer.activation_bytes)


def _range_sums(values: list[int]) -> Sizes:
    """Return the sum of values[u:v] at [u, v]."""
    prefix = np.concatenate(([0], np.cumsum(np.array(values, dtype=np.int64))))
    sums: Sizes = prefix[None, :] - prefix[:, None]
    return sums


def _range_maxima(values: list[int]) -> Sizes:
    """Return the largest of values[u:v] at [u, v]; 0 where v ≤ u."""
    maxima = np.zeros((len(values) + 1, len(values) + 1), dtype=np.int64)
    for first in range(len(values)):
        maxima[first, first + 1 :] = np.maximum.accumulate(np.array(values[first:], dtype=np.int64))
    return maxima
