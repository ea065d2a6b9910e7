"""Plans for nodes that are slower than the profile says: pipelines that contain them get less work.

A stage is as fast as its node: all its times are divided by the node's speed. For a given assignment of
nodes, three things help:

* *shares*: the batch is distributed again, by the pipelines' true times;
* *together*: nodes in equal slots (the same layers on as many devices) of several pipelines exchange slots,
  so that the slow ones slow down as few pipelines as possible. This moves no bytes: which of two nodes
  takes which of two equal slots does not change what they lack;
* *cuts*: pipelines with slow stages are cut again, so that these have fewer layers. That moves layers, and
  is done where the time saved until the next failure is more than the time of the move.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from planner.changes.cover import Masks
from planner.changes.tradeoff import expected_iteration_s
from planner.changes.transition import busiest_bytes, plan_transfers
from planner.mapping.recut import recut
from planner.pipelines.batch import kinds_of
from planner.pipelines.distribution import distribute_batch
from planner.stages.costs import StageCosts
from planner.values import Device, PipelinePlacement, StagePlacement, StageTemplate

Placements = tuple[PipelinePlacement, ...]

Speeds = Mapping[str, float]
"""Speed of nodes as factors of the profile's; 1 for nodes that are not named."""

NOTABLE_SLOWDOWN = 0.05
"""Relative difference below which speeds and times count as equal."""


def has_notable_stragglers(speeds: Speeds, nodes: Sequence[str]) -> bool:
    """Return whether the speed of any of these nodes makes a difference."""
    return any(abs(speeds.get(node, 1.0) - 1.0) > NOTABLE_SLOWDOWN for node in nodes)


def slowness(stages: Sequence[StagePlacement], speeds: Speeds) -> list[float]:
    """Return the factor by which each stage takes longer than the profile says."""
    return [1.0 / speeds.get(stage.devices[0].node, 1.0) for stage in stages]


def _step_costs(
    costs: StageCosts, placements: Sequence[PipelinePlacement], speeds: Speeds
) -> list[Callable[[int], float]]:
    """Return the milliseconds of a step of each pipeline on these very nodes, for any share of the batch; equal
    pipelines have the same function.
    """
    known: dict[object, Callable[[int], float]] = {}
    found: list[Callable[[int], float]] = []
    for placement in placements:
        factors = slowness(placement.stages, speeds)
        key = (_shape(placement), tuple(factors))
        if key not in known:
            stages = tuple(map(_unplaced, placement.stages))
            known[key] = costs.step_cost(stages, len(placements), factors)
        found.append(known[key])
    return found


def estimates_s(
    costs: StageCosts, placements: Sequence[PipelinePlacement], speeds: Speeds
) -> tuple[float, ...]:
    """Return the time of one step of each pipeline, with the present shares."""
    return tuple(
        cost_ms(placement.microbatches) / 1e3
        for cost_ms, placement in zip(_step_costs(costs, placements, speeds), placements, strict=True)
    )


def estimates_still_hold(costs: StageCosts, placements: Sequence[PipelinePlacement], speeds: Speeds) -> bool:
    """Return whether these pipelines take as long as estimated, which means that they were made for such
    speeds.
    """
    return all(
        abs(now_s - placement.estimated_s) <= NOTABLE_SLOWDOWN * placement.estimated_s
        for now_s, placement in zip(estimates_s(costs, placements, speeds), placements, strict=True)
    )


def redistribute_batch(
    costs: StageCosts, placements: Sequence[PipelinePlacement], speeds: Speeds
) -> Placements:
    """Return the same placements with the best shares for these speeds, and their estimated times."""
    step_costs, policy = _step_costs(costs, placements, speeds), costs.policy
    shares = distribute_batch(policy.batch_objective, step_costs, policy.microbatches, policy.batch_solver)
    shared: list[PipelinePlacement] = []
    first = 0
    for placement, cost_ms, share in zip(placements, step_costs, shares, strict=True):
        estimated_s = cost_ms(share) / 1e3
        shared.append(replace(placement, first_microbatch=first, microbatches=share, estimated_s=estimated_s))
        first += share
    return tuple(shared)


def rebalance(
    costs: StageCosts, starts: Iterable[Placements], speeds: Speeds, masks: Masks, horizon_s: float
) -> Placements:
    """Return the placements with the least expected time of a step (planner/changes/tradeoff.py) that can be
    made from ``starts`` under these speeds; the earlier ones where the gain is small.

    :param starts: pipelines on the same nodes; how they share the batch does not matter.
    """
    best: Placements | None = None
    least_s = 0.0
    for start in starts:
        for placements in _variants(costs, start, speeds):
            iteration_s = max(placement.estimated_s for placement in placements)
            if best is not None and iteration_s >= least_s:
                continue
            found_s = expected_iteration_s(iteration_s, _moving_s(costs, placements, masks), horizon_s)
            if best is None or found_s < least_s * (1 - NOTABLE_SLOWDOWN):
                best, least_s = placements, found_s
    assert best is not None, "there is at least one start"
    return best


def _variants(costs: StageCosts, start: Placements, speeds: Speeds) -> Iterable[Placements]:
    """Yield the variants of a start, first those that move no bytes."""
    yield redistribute_batch(costs, start, speeds)
    together = redistribute_batch(costs, group_slow_nodes(start, speeds), speeds)
    yield together
    yield redistribute_batch(costs, [_recut(costs, placement, speeds) for placement in together], speeds)


def _recut(costs: StageCosts, placement: PipelinePlacement, speeds: Speeds) -> PipelinePlacement:
    """Return the pipeline cut again for the speeds of its stages, where they differ."""
    factors = slowness(placement.stages, speeds)
    if max(factors) <= min(factors) * (1 + NOTABLE_SLOWDOWN):
        return placement
    cuts = recut(costs, [_unplaced(stage) for stage in placement.stages], factors, placement.microbatches)
    stages = tuple(
        replace(stage, first_layer=cut.first_layer, end_layer=cut.end_layer, **cut.mode._asdict())
        for stage, cut in zip(placement.stages, cuts, strict=True)
    )
    return replace(placement, stages=stages)


def _moving_s(costs: StageCosts, placements: Placements, masks: Masks) -> float:
    """Return the time until the device that receives or sends most is done, as ``tradeoff.transfer_s``."""
    transfers = plan_transfers(costs.profile, placements, masks) or ()
    return busiest_bytes(transfers, placements) / costs.profile.link.bytes_per_s


def group_slow_nodes(placements: Sequence[PipelinePlacement], speeds: Speeds) -> Placements:
    """Return placements with the slow nodes in as few pipelines as exchanges between equal slots permit.

    Pipelines with equal stages form a family. In each of its slots the slowest node goes to the family's
    first pipeline, the next slowest to the second, and so on. The first pipeline is the one that already
    has the slowest node. Thereby the slow nodes of all slots come together. Equally fast nodes stay where
    they are.
    """
    taken = [list(placement.nodes) for placement in placements]
    for numbers in kinds_of(list(map(_shape, placements))).values():
        ranked = sorted(numbers, key=lambda number: min(speeds.get(node, 1.0) for node in taken[number]))
        for place in range(len(taken[ranked[0]])):
            _slowest_first(taken, ranked, place, speeds)
    devices = {
        node: [stage.devices for stage in placement.stages if stage.devices[0].node == node]
        for placement in placements
        for node in placement.nodes
    }
    return tuple(
        placement if list(placement.nodes) == nodes else _moved(placement, nodes, devices)
        for placement, nodes in zip(placements, taken, strict=True)
    )


def _slowest_first(taken: list[list[str]], ranked: Sequence[int], place: int, speeds: Speeds) -> None:
    """Swap as few nodes in slot ``place`` as necessary for their speeds to ascend in the order of ``ranked``."""
    for position, number in enumerate(ranked):
        here = taken[number][place]
        later = min(ranked[position:], key=lambda other: speeds.get(taken[other][place], 1.0))
        if speeds.get(taken[later][place], 1.0) < speeds.get(here, 1.0) * (1 - NOTABLE_SLOWDOWN):
            taken[number][place], taken[later][place] = taken[later][place], here


def _moved(
    placement: PipelinePlacement, nodes: Sequence[str], devices: Mapping[str, Sequence[tuple[Device, ...]]]
) -> PipelinePlacement:
    """Return the pipeline's stages on other nodes, which keep their own order of devices."""
    own = {node: list(devices[node]) for node in nodes}
    at = dict(zip(placement.nodes, nodes, strict=True))
    stages = tuple(
        replace(stage, devices=own[at[stage.devices[0].node]].pop(0)) for stage in placement.stages
    )
    return replace(placement, stages=stages)


def _shape(placement: PipelinePlacement) -> tuple[tuple[int, int, int], ...]:
    return tuple((stage.first_layer, stage.end_layer, len(stage.devices)) for stage in placement.stages)


def _unplaced(stage: StagePlacement) -> StageTemplate:
    return StageTemplate(
        first_layer=stage.first_layer,
        end_layer=stage.end_layer,
        node_offset=0,
        devices=len(stage.devices),
        **stage.mode._asdict(),
    )
