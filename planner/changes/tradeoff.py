"""The choice between a better plan and fewer bytes to move: the layout that commits most steps until the next
failure.

Nothing is trained while state moves. Failures come at an unknown moment X, which, with nothing else known,
is exponential with mean H, the *horizon*. With t seconds of transfer and T seconds a step, the expected
number of steps until then is E[max(0, X − t)] / T = H·e^(−t/H) / T. So the planner takes the layout with
the least *expected time of a step*, T·e^(t/H): the steps until the next failure pay the transfer back,
whatever their number. With H → ∞ only T counts; a transfer that takes as long as H makes each step e times
as expensive.

Among layouts whose steps take nearly the same time, those are preferred whose devices have room for old and
new layers together (``planner.changes.transition``). ``place_stages`` puts the chosen layout on its nodes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from planner.changes.assignment import (
    Assigner,
    Assignment,
    NodeSlot,
    Position,
    slot_parts,
    template_slots,
)
from planner.changes.candidates import PipelineLayout
from planner.changes.cover import Masks, StateNeeds
from planner.changes.transition import memory_headroom
from planner.errors import StateLostError
from planner.pipelines.instantiation import Instantiation, Instantiator
from planner.stages.memory import MemoryModel
from planner.values import ConsideredPlan, Device, Link, PipelinePlacement, StagePlacement, Template

DEFAULT_HORIZON_S = 3600.0
"""Horizon if nothing is known: an hour, the middle one of the failure rates at which Oobleck was measured
(§7.2: every 6 hours, every hour, every 10 minutes).
"""

TIE_TOLERANCE = 1e-9
"""Relative difference below which expected times count as equal, so that the fewest bytes decide."""

COUNTED_NODES = 128
"""Largest number of nodes for which bytes are counted for all layouts, so that the user can see them; it takes
a few milliseconds.
"""

MEMORY_FIT_TOLERANCE = 0.05
"""Relative difference in the expected time of a step up to which a layout with room for old and new state
together is preferred.
"""

_SHORTEST_HORIZON_S = 1e-3
"""Lower bound of the horizon."""

_LARGEST_EXPONENT = 500.0
"""Upper bound of the exponent, so that every figure stays finite."""


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """A layout with its nodes and its total cost."""

    layout: PipelineLayout
    instantiation: Instantiation
    places: tuple[tuple[NodeSlot, ...], ...]
    assignment: Assignment
    considered: ConsideredPlan


def transfer_s(assignment: Assignment, link: Link) -> float:
    """Return how long state moves: the larger of the bytes that the busiest receiver receives and the bytes
    that the busiest sender sends (each layer's bytes spread evenly over its holders), over the link of one
    device. All other devices move their bytes in the same time.
    """
    return max(assignment.received_bytes, assignment.sent_bytes) / link.bytes_per_s


def expected_iteration_s(iteration_s: float, moving_s: float, horizon_s: float) -> float:
    """Return T·e^(t/H): the time of a step if the transfer is paid back until the next failure; always finite."""
    return iteration_s * math.exp(min(moving_s / max(horizon_s, _SHORTEST_HORIZON_S), _LARGEST_EXPONENT))


def choose_layout(
    layouts: Sequence[PipelineLayout],
    *,
    instantiator: Instantiator,
    assigner: Assigner,
    nodes: Sequence[str],
    masks: Masks,
    needs: StateNeeds,
    earlier: Sequence[Sequence[str]],
    link: Link,
    horizon_s: float,
    memory: MemoryModel | None = None,
) -> tuple[CandidatePlan, tuple[ConsideredPlan, ...]]:
    """Return the layout to take, and all that were considered: the chosen one first, then by their expected
    time of a step.

    On many nodes, bytes are not counted for layouts that are slower before they have moved any.

    :param nodes: names in natural order.
    :param earlier: the nodes of each previous pipeline.
    :param memory: model of the memory that old and new layers take together; ``None`` if old ones take none.
    :raises StateLostError: no layout can be assigned so that every layer is held.
    """
    proposed = [(layout, instantiator.of(layout.sizes)) for layout in layouts]
    found: list[CandidatePlan] = []
    skipped: list[ConsideredPlan] = []
    templates = instantiator.templates.by_nodes
    least_s = math.inf
    lost: StateLostError | None = None
    for layout, instantiation in sorted(proposed, key=lambda pair: pair[1].iteration_ms):
        iteration_s = instantiation.iteration_ms / 1e3
        considered = partial(
            ConsideredPlan, method=layout.method, sizes=tuple(layout.sizes), iteration_s=iteration_s
        )
        if len(nodes) > COUNTED_NODES and iteration_s > least_s:
            skipped.append(considered(transfer_bytes=None, transfer_s=None, expected_iteration_s=iteration_s))
            continue
        shapes = {size: template_slots(templates[size]) for size in instantiation.sizes}
        places = tuple(shapes[size] for size in layout.sizes)
        free = {size: () if memory is None else memory_headroom(templates[size], memory) for size in shapes}
        rooms = [free[size] for size in layout.sizes]
        divided = {size: slot_parts(templates[size]) for size in shapes}
        parts = [divided[size] for size in layout.sizes]
        try:
            assignment = assigner.assign(
                places, nodes, masks, _previous_positions(layout, earlier), needs, rooms, parts
            )
        except StateLostError as error:
            lost = error
            continue
        moving_s = transfer_s(assignment, link)
        expected_s = expected_iteration_s(iteration_s, moving_s, horizon_s)
        moved = considered(
            transfer_bytes=assignment.moved_bytes, transfer_s=moving_s, expected_iteration_s=expected_s
        )
        found.append(CandidatePlan(layout, instantiation, places, assignment, moved))
        least_s = min(least_s, expected_s)
    if not found:
        assert lost is not None, "there is always the best instantiation"
        raise lost
    roomy = [each for each in found if not each.assignment.excess_bytes]
    roomy_s = min((each.considered.expected_iteration_s for each in roomy), default=math.inf)
    among, least_s = (roomy, roomy_s) if roomy_s <= least_s * (1 + MEMORY_FIT_TOLERANCE) else (found, least_s)
    equal = [each for each in among if each.considered.expected_iteration_s <= least_s * (1 + TIE_TOLERANCE)]
    order = list(layouts)
    chosen = min(equal, key=lambda each: (each.assignment.moved_bytes, order.index(each.layout)))
    others = [*(each.considered for each in found if each is not chosen), *skipped]
    others.sort(key=lambda considered: considered.expected_iteration_s)
    return chosen, (chosen.considered, *others)


def _previous_positions(layout: PipelineLayout, earlier: Sequence[Sequence[str]]) -> dict[str, Position]:
    """Return the position in the layout that each node would have if it stayed, given the nodes of the
    ``earlier`` pipelines.
    """
    return {
        node: (number, offset)
        for number, (_, before) in enumerate(layout.pipelines)
        if before is not None
        for offset, node in enumerate(earlier[before])
    }


def place_stages(
    weighed: CandidatePlan, by_size: Mapping[int, Template], assigner: Assigner, masks: Masks
) -> tuple[PipelinePlacement, ...]:
    """Return the pipelines on named nodes, in the order of the layout; among pipelines of equal size the first
    ones get the larger shares.
    """
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
    """Return the template's stages on ``nodes``, which are in the order of its slots.

    :param orders: device that takes each range of a node's slot, for each node.
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
                **stage.mode._asdict(),
            )
        )
    return tuple(stages)
