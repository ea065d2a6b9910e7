"""Slow nodes: their pipelines get less work, they are grouped, and nothing gets slower for it."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.changes.stragglers import (
    estimates_s,
    estimates_still_hold,
    group_slow_nodes,
    rebalance,
    redistribute_batch,
)
from planner.planner import Planner
from planner.stages.layers import expected_ms
from planner.values import (
    Device,
    Link,
    ModelProfile,
    PipelinePlacement,
    Plan,
    Policy,
    Situation,
    StagePlacement,
)
from tests.helpers.oracles import check_plan, profile_of, shares, simulated_makespan_ms, stage_ms

FOREVER = 1e12
Cuts = tuple[tuple[int, int], ...]


def planner_of(
    times_ms: list[float], *, microbatches: int = 8, devices: int = 1, link_bytes_per_s: float = 1e9
) -> Planner:
    """Return a planner where activations and the all-reduce cost nothing and memory has no limit."""
    link = Link(latency_ms=0.0, bytes_per_s=link_bytes_per_s)
    profile = replace(profile_of(times_ms), link=link)
    policy = Policy(global_batch=4 * microbatches, microbatch_rows=4, tolerate=1, devices_per_node=devices)
    return Planner(profile, policy)


def pipeline(nodes: str, cuts: Cuts, microbatches: int = 1) -> PipelinePlacement:
    """Return a pipeline of one-device stages on nodes named by single letters."""
    return PipelinePlacement(
        stages=tuple(
            StagePlacement(first_layer=u, end_layer=v, devices=(Device(node=node, index=0),))
            for node, (u, v) in zip(nodes, cuts, strict=True)
        ),
        first_microbatch=0,
        microbatches=microbatches,
        estimated_s=0.0,
    )


def slow_ms(
    profile: ModelProfile, cuts: Cuts, nodes: tuple[str, ...], speeds: dict[str, float], count: int
) -> float:
    times = [stage_ms(profile, (u, v, 1), 4) for u, v in cuts]
    factors = [1 / speeds.get(node, 1.0) for node in nodes]
    return simulated_makespan_ms(
        [there * factor for (there, _), factor in zip(times, factors, strict=True)],
        [back * factor for (_, back), factor in zip(times, factors, strict=True)],
        [0.0] * (len(cuts) - 1),
        count,
    )


def step_s(plan: tuple[PipelinePlacement, ...]) -> float:
    return max(placement.estimated_s for placement in plan)


speeds_of_four = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.25, 0.5, 0.8, 1.3]), max_size=4)
layer_times = st.lists(st.sampled_from([4.0, 6.0, 10.0, 24.0]), min_size=4, max_size=6)


@given(layer_times, speeds_of_four, st.integers(2, 9), st.integers(1, 3))
@settings(max_examples=60)
def test_shares_are_the_best_of_all(
    times: list[float], speeds: dict[str, float], count: int, cut: int
) -> None:
    planner = planner_of(times, microbatches=count)
    cuts: Cuts = ((0, cut), (cut, len(times)))
    found = redistribute_batch(planner.costs, [pipeline("ab", cuts), pipeline("cd", cuts)], speeds)
    best_ms = min(
        max(
            slow_ms(planner.profile, cuts, placement.nodes, speeds, share)
            for placement, share in zip(found, given, strict=True)
        )
        for given in shares(count, 2)
    )
    assert step_s(found) == pytest.approx(best_ms / 1e3)
    assert [p.first_microbatch for p in found] == [0, found[0].microbatches]
    assert sum(p.microbatches for p in found) == count


def exchanges(rows: list[str]) -> Iterator[list[str]]:
    """Yield all ways to exchange nodes between equal slots; rows are pipelines of the same cuts."""
    for columns in product(*(permutations(column) for column in zip(*rows, strict=True))):
        yield ["".join(row) for row in zip(*columns, strict=True)]


@given(st.sets(st.sampled_from("abcdef"), max_size=5), st.sampled_from([0.2, 0.5]), st.integers(40, 60))
@settings(max_examples=30)
def test_equally_slow_nodes_are_put_together_as_well_as_can_be(
    slow: set[str], factor: float, count: int
) -> None:
    """There are so many microbatches that a pipeline's steady state counts, not its filling."""
    planner = planner_of([10.0, 10.0, 10.0, 10.0], microbatches=count)
    cuts: Cuts = ((0, 2), (2, 4))
    speeds = dict.fromkeys(slow, factor)
    rows = ["ab", "cd", "ef"]

    def best_s(names: list[str]) -> float:
        return step_s(redistribute_batch(planner.costs, [pipeline(row, cuts) for row in names], speeds))

    together = group_slow_nodes([pipeline(row, cuts) for row in rows], speeds)
    assert step_s(redistribute_batch(planner.costs, together, speeds)) == pytest.approx(
        min(best_s(names) for names in exchanges(rows))
    )
    assert sorted(node for p in together for node in p.nodes) == list("abcdef")


def test_quick_nodes_stay_where_they_are() -> None:
    cuts: Cuts = ((0, 2), (2, 4))
    rows = [pipeline("ab", cuts), pipeline("cd", cuts), pipeline("ef", cuts)]
    assert group_slow_nodes(rows, {}) == tuple(rows)
    found = group_slow_nodes(rows, {"b": 0.5, "e": 0.4})
    assert [p.nodes for p in found] == [("a", "f"), ("c", "d"), ("e", "b")]
    other = pipeline("gh", ((0, 1), (1, 4)))
    assert group_slow_nodes([rows[0], other], {"b": 0.5, "g": 0.5}) == (rows[0], other), "other places"


def test_devices_follow_their_node() -> None:
    def two_devices(node: str, order: tuple[int, int]) -> PipelinePlacement:
        stages = tuple(
            StagePlacement(first_layer=2 * n, end_layer=2 * n + 2, devices=(Device(node=node, index=index),))
            for n, index in enumerate(order)
        )
        return replace(pipeline("", ()), stages=stages)

    def chained(first: PipelinePlacement, second: PipelinePlacement) -> PipelinePlacement:
        later = tuple(
            replace(s, first_layer=s.first_layer + 4, end_layer=s.end_layer + 4) for s in second.stages
        )
        return replace(first, stages=first.stages + later)

    rows = [
        chained(two_devices("a", (0, 1)), two_devices("b", (1, 0))),
        chained(two_devices("c", (0, 1)), two_devices("d", (0, 1))),
    ]
    found = group_slow_nodes(rows, {"a": 0.5, "d": 0.5})
    assert [p.nodes for p in found] == [("a", "d"), ("c", "b")]
    assert [d.index for s in found[1].stages for d in s.devices] == [0, 1, 1, 0]


def test_a_slow_stage_gets_fewer_layers_where_that_pays() -> None:
    planner = planner_of([10.0] * 8, microbatches=16, link_bytes_per_s=1.0)
    start = (pipeline("ab", ((0, 4), (4, 8)), 16),)
    masks = {"a": (0b00001111,), "b": (0b11110000,)}
    found = rebalance(planner.costs, [start], {"b": 1 / 3}, masks, FOREVER)
    assert [(s.first_layer, s.end_layer) for s in found[0].stages] == [(0, 6), (6, 8)]
    before = redistribute_batch(planner.costs, start, {"b": 1 / 3})
    assert step_s(found) < 0.7 * step_s(before)
    soon = rebalance(planner.costs, [start], {"b": 1 / 3}, masks, 1.0)
    assert soon == before, "the next failure comes before the bytes have moved"


def test_expected_times_are_those_of_the_stages() -> None:
    planner = planner_of([4.0, 8.0, 12.0])
    placed = [pipeline("ab", ((0, 1), (1, 3)))]
    found = expected_ms(planner.profile, planner.policy, placed)
    assert found == {Device(node="a", index=0): 4.0, Device(node="b", index=0): 20.0}


# --- in plans ------------------------------------------------------------------------------------


def holdings_of(plan: Plan) -> dict[Device, frozenset[int]]:
    return {
        device: frozenset(range(stage.first_layer, stage.end_layer))
        for placement in plan.pipelines
        for stage in placement.stages
        for device in stage.devices
    }


def replanned(planner: Planner, before: Plan, **changes: object) -> Plan:
    situation = Situation(
        nodes=(*before.nodes, *before.idle_nodes), holdings=holdings_of(before), previous=before
    )
    situation = replace(situation, **changes)
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    return plan


def test_a_slow_pipeline_gets_less_and_its_share_back() -> None:
    planner = planner_of([10.0] * 4, microbatches=12)
    first = planner.plan(planner.initial_situation(("a", "b", "c", "d")))
    even = {p.nodes: p.microbatches for p in first.pipelines}
    slow = replanned(planner, first, speeds={"a": 0.25})
    assert slow.method == "rebalance"
    assert "a" in slow.reason and slow.reason != first.reason
    less = {node: p.microbatches / len(p.nodes) for p in slow.pipelines for node in p.nodes}
    assert less["a"] == min(less.values()) < max(less.values())
    assert slow.estimated_iteration_s < max(estimates_s(planner.costs, first.pipelines, {"a": 0.25}))
    again = replanned(planner, slow, speeds={"a": 0.25})
    assert (again.method, again.pipelines) == ("unchanged", slow.pipelines)
    back = replanned(planner, slow)
    assert {p.nodes: p.microbatches for p in back.pipelines} == even
    assert back.estimated_iteration_s == pytest.approx(first.estimated_iteration_s)


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[Planner, Plan, Situation]:
    """Draw a plan, and nodes that become slow, are lost or join."""
    planner = planner_of(
        draw(st.lists(st.sampled_from([4.0, 6.0, 10.0, 24.0]), min_size=3, max_size=7)),
        microbatches=draw(st.integers(6, 12)),
        devices=draw(st.sampled_from([1, 1, 2])),
    )
    names = [f"n{n}" for n in range(6)]
    before = planner.plan(planner.initial_situation(names[: draw(st.integers(2, 5))]))
    nodes = [*before.nodes, *before.idle_nodes]
    usable = nodes[: max(1, len(nodes) - draw(st.integers(0, 1)))]
    usable += draw(st.sampled_from([[], ["n5"]]))
    speeds = draw(st.dictionaries(st.sampled_from(usable), st.sampled_from([0.2, 0.5, 0.7, 1.4])))
    holdings = {device: layers for device, layers in holdings_of(before).items() if device.node in usable}
    horizon_s = draw(st.sampled_from([None, 1e-3, 1.0, 1e4]))
    situation = Situation(
        nodes=tuple(usable), holdings=holdings, previous=before, speeds=speeds, horizon_s=horizon_s
    )
    return planner, before, situation


@given(disturbed())
@settings(max_examples=150)
@pytest.mark.long
def test_plans_that_know_slow_nodes_are_valid_and_never_slower(
    case: tuple[Planner, Plan, Situation],
) -> None:
    planner, _, situation = case
    held = frozenset[int]().union(*situation.holdings.values())
    if len(held) < len(planner.profile.layers):
        return
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    assert estimates_still_hold(planner.costs, plan.pipelines, situation.speeds)
    unaware = planner.plan(replace(situation, speeds={}))
    assert plan.estimated_iteration_s <= 1.0500001 * max(
        estimates_s(planner.costs, unaware.pipelines, situation.speeds)
    )
