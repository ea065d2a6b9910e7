"""Templates on named nodes: the stages of each pipeline with their devices and their share of the batch."""

from collections.abc import Mapping, Sequence

from planner.changes.assignment import Assigner
from planner.changes.cover import Masks
from planner.changes.tradeoff import Weighed
from planner.values import Device, PipelinePlacement, StagePlacement, Template


def placed(
    weighed: Weighed, by_size: Mapping[int, Template], assigner: Assigner, masks: Masks
) -> tuple[PipelinePlacement, ...]:
    """The pipelines in the order of the layout; of equal ones the first get the larger shares."""
    found = weighed.instantiation
    shares: dict[int, list[tuple[int, float]]] = {}
    for size, microbatches, time_ms in zip(found.sizes, found.microbatches, found.pipeline_ms, strict=True):
        shares.setdefault(size, []).append((microbatches, time_ms))
    for of_size in shares.values():
        of_size.reverse()
    placements: list[PipelinePlacement] = []
    first = 0
    for size, nodes, places in zip(
        weighed.layout.sizes, weighed.assignment.taken, weighed.places, strict=True
    ):
        orders = [assigner.order_inside(masks[n], place) for n, place in zip(nodes, places, strict=True)]
        microbatches, time_ms = shares[size].pop()
        placements.append(
            PipelinePlacement(
                stages=_on_devices(by_size[size], nodes, orders),
                first_microbatch=first,
                microbatches=microbatches,
                estimated_s=time_ms / 1e3,
            )
        )
        first += microbatches
    return tuple(placements)


def _on_devices(
    template: Template, nodes: Sequence[str], orders: Sequence[Sequence[int]]
) -> tuple[StagePlacement, ...]:
    """The template's stages on ``nodes``, which are in the order of its places.

    :param orders: for each node, which device takes each range of its place.
    """
    used = [0] * len(nodes)
    stages: list[StagePlacement] = []
    for stage in template.stages:
        offset = stage.node_offset
        begin = used[offset]
        used[offset] = begin + stage.devices
        taken = sorted(orders[offset][begin : begin + stage.devices])
        stages.append(
            StagePlacement(
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                devices=tuple(Device(node=nodes[offset], index=index) for index in taken),
                recompute=stage.recompute,
                within=stage.within,
            )
        )
    return tuple(stages)
