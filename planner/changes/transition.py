"""Memory while old and new layers are on a device together, from a plan's Resume to its first commit.

Until that commit the next plan may need the old state, so a device keeps its old layers (parameters and optimizer
state; their gradients are gone) beside all that its new stage takes. Where this is more than the device has, it
releases old layers that its new stage does not need before new state arrives: it *drops* those that enough other
nodes of the plan hold, so that every layer still survives the tolerated failures and one node's loss at least, and
*parks* others in host memory, from where they can be sent, until the first commit. Under ZeRO-1, and with shards
inside a node, state is in parts, and none of it is released.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache

from planner.changes.cover import Masks, layers_of
from planner.stages.memory import MemoryModel
from planner.values import (
    Device,
    ModelProfile,
    PipelinePlacement,
    Released,
    StagePlacement,
    Template,
    Transfer,
)

Room = tuple[int, ...]
"""For each device of a place, the bytes that it has beside what its stage takes."""


def rooms_of(template: Template, memory: MemoryModel) -> tuple[Room, ...]:
    """Return the room of each place of the template (``planner.changes.assignment.places_of``); empty where memory
    has no limit."""
    if memory.limit_bytes is None:
        return ()
    rooms: list[list[int]] = [[] for _ in range(template.nodes)]
    for stage, size in zip(template.stages, memory.template_bytes(template.stages), strict=True):
        rooms[stage.node_offset] += [memory.limit_bytes - size] * stage.devices
    return tuple(tuple(room) for room in rooms)


def released(
    profile: ModelProfile,
    memory: MemoryModel,
    pipelines: Sequence[PipelinePlacement],
    masks: Masks,
    moves: Sequence[Transfer],
    tolerate: int,
) -> tuple[Released, ...]:
    """Return what devices without room for their old layers beside their new stage park or drop.

    :param masks: layers whose state each device has in its memory.
    :param moves: what is sent; a source parks what it is to send, and never drops it.
    :param tolerate: failures that the nodes which keep a layer must exceed in number before it is dropped; at least
        one failure is reckoned with.
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
            others = sum(count > 0 for node, count in holders[layer].items() if node != device.node)
            if excess > 0 and others > max(tolerate, 1) and (device, layer) not in sent:
                dropped.append(layer)
                holders[layer][device.node] -= 1
                excess -= size_of[layer]
        for layer in sorted(set(old).difference(dropped), key=lambda layer: (-size_of[layer], layer)):
            if excess > 0:
                parked.append(layer)
                excess -= size_of[layer]
        found.append(Released(device=device, parked=tuple(sorted(parked)), dropped=tuple(sorted(dropped))))
    return tuple(found)


def _stage_bytes(memory: MemoryModel, stage: StagePlacement, stages_after: int) -> int:
    return memory.stage_bytes(
        stage.first_layer,
        stage.end_layer,
        len(stage.devices),
        stages_after,
        stage.recompute,
        stage.within,
    )


def _holders(pipelines: Sequence[PipelinePlacement], masks: Masks) -> dict[int, Counter[str]]:
    """Return how many devices of each node of the plan hold each layer."""
    holders: dict[int, Counter[str]] = {}
    for node in {node for pipeline in pipelines for node in pipeline.nodes}:
        for mask in masks[node]:
            for layer in layers_of(mask):
                holders.setdefault(layer, Counter())[node] += 1
    return holders
