"""Transfers before a plan can start, and the memory that the old state takes from the plan's Resume to its
first commit.

There is one transfer for each device and layer that it lacks. Until that commit the next plan may need the
old state, so a device keeps its old layers (parameters and optimizer state; their gradients are gone) in
addition to its new stage. Where this is more than the device has, it releases old layers that its new stage
does not need before new state arrives: it *drops* those that enough other nodes of the plan hold, so that
every layer still survives the tolerated failures and at least the loss of one node, and *parks* others in
host memory, from where they can be sent, until the first commit. Under ZeRO-1, and with shards inside a
node, state is in parts, and none of it is released.
"""

from collections.abc import Sequence
from functools import cache
from heapq import heapify, heapreplace

from planner.changes.cover import Masks, layers_of
from planner.stages.memory import MemoryModel
from planner.values import (
    Device,
    ModelProfile,
    PipelinePlacement,
    ReleasedLayers,
    StagePlacement,
    Template,
    Transfer,
)


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

    short: list[tuple[Device, tuple[int, ...], int]] = []
    for pipeline in pipelines:
        for number, stage in enumerate(pipeline.stages):
            needed = _stage_bytes(memory, stage, len(pipeline.stages) - 1 - number)
            for device in stage.devices:
                old, size = old_of(masks[device.node][device.index], stage.first_layer, stage.end_layer)
                if size and size + needed > memory.limit_bytes:
                    short.append((device, old, size + needed - memory.limit_bytes))
    if not short:
        return ()
    holders = _holders(pipelines, masks)
    sent = {(move.source, move.layer) for move in moves}
    found = []
    for device, old, too_much in short:
        excess = too_much
        dropped: list[int] = []
        parked: list[int] = []
        for layer in sorted(old, key=lambda layer: (-size_of[layer], layer)):
            others = len(holders[layer] - {device.node})
            if excess > 0 and others > max(tolerate, 1) and (device, layer) not in sent:
                dropped.append(layer)
                # The node no longer counts, even if another of its devices keeps the layer.
                holders[layer].discard(device.node)
                excess -= size_of[layer]
        for layer in sorted(set(old).difference(dropped), key=lambda layer: (-size_of[layer], layer)):
            if excess > 0:
                parked.append(layer)
                excess -= size_of[layer]
        found.append(
            ReleasedLayers(device=device, parked=tuple(sorted(parked)), dropped=tuple(sorted(dropped)))
        )
    return tuple(found)


def _stage_bytes(memory: MemoryModel, stage: StagePlacement, stages_after: int) -> int:
    return memory.stage_bytes(
        stage.first_layer,
        stage.end_layer,
        len(stage.devices),
        stages_after,
        stage.recompute,
        stage.within,
        stage.replicas,
    )


def _holders(pipelines: Sequence[PipelinePlacement], masks: Masks) -> dict[int, set[str]]:
    """Return the nodes of the plan that hold each layer."""
    holders: dict[int, set[str]] = {}
    for node in {node for pipeline in pipelines for node in pipeline.nodes}:
        for mask in masks[node]:
            for layer in layers_of(mask):
                holders.setdefault(layer, set()).add(node)
    return holders
