"""Transfers before a plan can start, and the memory that the old state takes from the plan's Resume to its
first commit.

There is one transfer for each device and layer that it lacks. Until that commit the next plan may need the
old state, so a device keeps its old layers (parameters and optimizer state; their gradients are gone) in
addition to its new stage. Where this is more than the device has, it releases old layers that its new stage
does not need before new state arrives: it *drops* those that enough other nodes of the plan hold, so that
every layer still survives the tolerated failures and at least the loss of one node, and *parks* others in
host memory, from where they can be sent, until the first commit.

Under ZeRO-1, and where devices hold shards or tensor-parallel parts, state is in parts, and a device keeps
those that its new stage does not have exactly: also of layers of its new stage, whose ranges change. They are
parked in the same way. A layer's parts are dropped only if other nodes have all of the layer, which ZeRO-1
excludes.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from functools import cache
from heapq import heapify, heapreplace
from math import ceil
from typing import NamedTuple

from planner.changes.cover import Masks, layers_of
from planner.changes.parts import (
    FractionRange,
    incomplete,
    ranges_by_layer,
    retained_parts,
    share_of,
    stages_by_layer,
)
from planner.stages.memory import MemoryModel
from planner.values import (
    Device,
    LayerProfile,
    ModelProfile,
    PipelinePlacement,
    ReleasedLayers,
    StagePlacement,
    StatePart,
    Template,
    Transfer,
)


def busiest_bytes(transfers: Iterable[Transfer], pipelines: Sequence[PipelinePlacement]) -> float:
    """Return the bytes that the busiest device receives or sends. Where a stage of ``pipelines`` divides its state,
    each of its devices receives its part of a layer.
    """
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    parts = {device: stage.parts for stage in stages for device in stage.devices}
    received: dict[Device, float] = {}
    sent: dict[Device, float] = {}
    for transfer in transfers:
        size_bytes = transfer.size_bytes / parts[transfer.target]
        received[transfer.target] = received.get(transfer.target, 0.0) + size_bytes
        sent[transfer.source] = sent.get(transfer.source, 0.0) + size_bytes
    return max((*received.values(), *sent.values()), default=0.0)


def plan_transfers(
    profile: ModelProfile, pipelines: Sequence[PipelinePlacement], masks: Masks
) -> tuple[Transfer, ...] | None:
    """Return the transfers of a plan, largest first.

    The source is a device of the same node where one holds the layer, else the device with the fewest bytes
    to send so far. Only devices with a slot in the plan can send: the others are in no process group.

    :returns: ``None`` where a layer that must move is held by no device of the plan.
    """
    devices: list[Device] = []
    node_of: list[int] = []
    ranks_of: list[list[int]] = []
    holding: dict[int, list[int]] = {}
    lacking: dict[int, list[int]] = {}
    numbers: dict[str, int] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            needs = (1 << stage.end_layer) - (1 << stage.first_layer)
            for device in stage.devices:
                number = numbers.setdefault(device.node, len(numbers))
                if number == len(ranks_of):
                    ranks_of.append([])
                ranks_of[number].append(len(devices))
                held = masks[device.node][device.index]
                holding.setdefault(held, []).append(len(devices))
                if needs & ~held:
                    lacking.setdefault(needs & ~held, []).append(len(devices))
                node_of.append(number)
                devices.append(device)
    wanted: dict[int, list[int]] = {}
    for missing, ranks in lacking.items():
        for layer in layers_of(missing):
            wanted.setdefault(layer, []).extend(ranks)
    sent = [0] * len(devices)
    moves: list[Transfer] = []
    for negative, layer in sorted((-profile.layers[layer].state_bytes, layer) for layer in wanted):
        holders = [rank for held, ranks in holding.items() if held >> layer & 1 for rank in ranks]
        if not holders:
            return None
        sources, near = _Sources(sent, holders), {node_of[rank] for rank in holders}
        is_holder = set(holders)
        for rank in sorted(wanted[layer]):
            number = node_of[rank]
            if number in near:
                source = min(is_holder.intersection(ranks_of[number]), key=lambda r: (sent[r], r))
            else:
                source = sources.least()
            sent[source] -= negative
            moves.append(
                Transfer(layer=layer, source=devices[source], target=devices[rank], size_bytes=-negative)
            )
    return tuple(moves)


class _Sources:
    """Holders of one layer, ordered by the bytes that they have to send so far, which only grow; ``sent`` is
    by rank.
    """

    def __init__(self, sent: Sequence[int], holders: Sequence[int]) -> None:
        self._sent = sent
        self._queue = [(sent[rank], rank) for rank in holders]
        heapify(self._queue)

    def least(self) -> int:
        """Return the rank with the fewest bytes to send."""
        sent, rank = self._queue[0]
        while sent != self._sent[rank]:
            heapreplace(self._queue, (self._sent[rank], rank))
            sent, rank = self._queue[0]
        return rank


MemoryHeadroom = tuple[int, ...]
"""Bytes, for each device of a slot, that its stage leaves free."""


def memory_headroom(template: Template, memory: MemoryModel) -> tuple[MemoryHeadroom, ...]:
    """Return the headroom of each slot of the template (``planner.changes.assignment.template_slots``); empty
    where memory has no limit.
    """
    if memory.limit_bytes is None:
        return ()
    rooms: list[list[int]] = [[] for _ in range(template.nodes)]
    for stage, size in zip(template.stages, memory.template_bytes(template.stages), strict=True):
        rooms[stage.node_offset] += [memory.limit_bytes - size] * stage.devices
    return tuple(tuple(room) for room in rooms)


def layers_to_release(
    profile: ModelProfile,
    memory: MemoryModel,
    pipelines: Sequence[PipelinePlacement],
    masks: Masks,
    moves: Sequence[Transfer],
    tolerate: int,
) -> tuple[ReleasedLayers, ...]:
    """Return the layers that devices park or drop, because old layers and the new stage do not fit together.

    :param masks: layers whose state each device has in its memory.
    :param moves: transfers of the plan; a source parks what it is to send, and never drops it.
    :param tolerate: number of failures that the nodes which keep a layer must exceed before it is dropped;
        at least one failure is assumed.
    """
    if memory.limit_bytes is None:
        return ()
    size_of = [layer.state_bytes for layer in profile.layers]

    @cache
    def old_of(held: int, first: int, end: int) -> tuple[tuple[int, ...], int]:
        old = tuple(layers_of(held & ~((1 << end) - (1 << first))))
        return old, sum(size_of[layer] for layer in old)

    short: list[_Shortage] = []
    for pipeline in pipelines:
        for number, stage in enumerate(pipeline.stages):
            needed = _stage_bytes(memory, stage, len(pipeline.stages) - 1 - number)
            for device in stage.devices:
                old, size = old_of(masks[device.node][device.index], stage.first_layer, stage.end_layer)
                if size and size + needed > memory.limit_bytes:
                    sizes = {layer: size_of[layer] for layer in old}
                    short.append(_Shortage(device, sizes, size + needed - memory.limit_bytes))
    if not short:
        return ()
    kept = {(move.source, move.layer) for move in moves}
    return _release(short, _holders(pipelines, masks), kept, tolerate)


def parts_to_release(
    profile: ModelProfile,
    memory: MemoryModel,
    pipelines: Sequence[PipelinePlacement],
    holdings: Mapping[Device, frozenset[int]],
    parts: Mapping[Device, Sequence[StatePart]],
    tolerate: int,
    *,
    zero1: bool,
) -> tuple[ReleasedLayers, ...]:
    """Return the layers whose parts devices park or drop, as ``layers_to_release``.

    A device of the plan never sends parts that it drops: the ranks choose among those that are left.

    :param holdings: layers of which each device has the whole parameters.
    :param parts: parts that each device holds, replicas in host memory included.
    """
    if memory.limit_bytes is None:
        return ()
    layers = len(profile.layers)
    stages_of = stages_by_layer(pipelines, layers)
    short: list[_Shortage] = []
    kept: set[tuple[Device, int]] = set()
    for number, pipeline in enumerate(pipelines):
        for position, stage in enumerate(pipeline.stages):
            own = range(stage.first_layer, stage.end_layer)
            room = memory.limit_bytes - _stage_bytes(memory, stage, len(pipeline.stages) - 1 - position)
            for device in stage.devices:
                whole = holdings.get(device, frozenset())
                own_parts = [part for part in parts.get(device, ()) if not part.replica]
                ranges: dict[int, list[FractionRange]] = {layer: [] for layer in whole}
                ranges |= ranges_by_layer(own_parts)
                share = share_of(stage, device)
                sizes = {}
                for layer, held_ranges in ranges.items():
                    new = (
                        retained_parts(stages_of[layer], number, device, zero1=zero1) if layer in own else []
                    )
                    sizes[layer] = _old_bytes(
                        profile.layers[layer],
                        held_ranges,
                        layer in whole,
                        new,
                        share if layer in own else None,
                    )
                excess = sum(sizes.values()) - room
                if excess > 0 and any(sizes.values()):
                    short.append(
                        _Shortage(device, {layer: size for layer, size in sizes.items() if size}, excess)
                    )
                    kept |= {(device, layer) for layer in own}
    if not short:
        return ()
    holders: dict[int, set[str]] = {layer: set() for layer in range(layers)}
    for node in {node for pipeline in pipelines for node in pipeline.nodes}:
        here = [
            [part for part in of_device if not part.replica]
            for device, of_device in parts.items()
            if device.node == node
        ]
        for layer in set(range(layers)).difference(incomplete(here, layers)):
            holders[layer].add(node)
    return _release(short, holders, kept, tolerate)


def _old_bytes(
    layer: LayerProfile,
    held: Sequence[FractionRange],
    whole: bool,
    new: Sequence[FractionRange],
    share: FractionRange | None,
) -> int:
    """Return the bytes of a layer that a device has next to its new stage.

    Memory of ranges that stay the same is used again.

    :param held: ranges of which the device has the optimizer state; ``whole``: it has all parameters.
    :param new: ranges of which the new stage keeps the optimizer state; ``share``: its range of the
        parameters, or ``None`` if it does not have the layer.
    """
    size = sum(
        (layer.optimizer_bytes * (end - low) for low, end in held if (low, end) not in new), Fraction()
    )
    everything = Fraction(0), Fraction(1)
    if whole:
        size += 0 if share == everything else layer.parameter_bytes
    else:
        size += sum(
            (layer.parameter_bytes * (end - low) for low, end in held if (low, end) != share), Fraction()
        )
    return ceil(size)


class _Shortage(NamedTuple):
    """A device whose old layers, with their sizes, and new stage exceed its memory by ``excess_bytes``."""

    device: Device
    sizes: dict[int, int]
    excess_bytes: int


def _release(
    short: Sequence[_Shortage],
    holders: Mapping[int, set[str]],
    kept: Set[tuple[Device, int]],
    tolerate: int,
) -> tuple[ReleasedLayers, ...]:
    """Choose layers to drop and to park, the largest first.

    :param holders: nodes of the plan that hold each layer; those that drop it are removed.
    :param kept: layers that a device does not drop.
    """
    found = []
    for device, sizes, too_much in short:
        excess = too_much
        dropped: list[int] = []
        parked: list[int] = []
        for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
            others = len(holders[layer] - {device.node})
            if excess > 0 and others > max(tolerate, 1) and (device, layer) not in kept:
                dropped.append(layer)
                # The node no longer counts, even if another of its devices keeps the layer.
                holders[layer].discard(device.node)
                excess -= sizes[layer]
        for layer in sorted(set(sizes).difference(dropped), key=lambda layer: (-sizes[layer], layer)):
            if excess > 0:
                parked.append(layer)
                excess -= sizes[layer]
        found.append(
            ReleasedLayers(device=device, parked=tuple(sorted(parked)), dropped=tuple(sorted(dropped)))
        )
    return tuple(found)


def _stage_bytes(memory: MemoryModel, stage: StagePlacement, stages_after: int) -> int:
    devices = len(stage.devices)
    return memory.stage_bytes(stage.first_layer, stage.end_layer, devices, stages_after, stage.mode)


def _holders(pipelines: Sequence[PipelinePlacement], masks: Masks) -> dict[int, set[str]]:
    """Return the nodes of the plan that hold each layer."""
    holders: dict[int, set[str]] = {}
    for node in {node for pipeline in pipelines for node in pipeline.nodes}:
        for mask in masks[node]:
            for layer in layers_of(mask):
                holders.setdefault(layer, set()).add(node)
    return holders
