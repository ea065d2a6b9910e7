"""Effects of failing and joining nodes on pipelines, nodes and the bytes that move."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from planner.changes.assignment import Assigner
from planner.changes.candidates import PipelineLayout, candidate_layouts, reinstantiate
from planner.changes.tradeoff import expected_iteration_s
from planner.errors import StateLostError, TooFewNodesError
from planner.planner import Planner
from planner.reasons import natural_key
from planner.values import Device, Link, ModelProfile, Plan, Policy, Situation
from tests.helpers.oracles import check_plan, layer, profile_of


def planner_of(layers: int = 8, memory_bytes: int | None = 120, **changes: object) -> Planner:
    """Return a planner whose devices have 120 bytes: 8 layers need two nodes, and fewer nodes do not suffice."""
    settings: dict[str, object] = {"global_batch": 64, "microbatch_rows": 4, **changes}
    return Planner(profile_of([1.0] * layers, memory_bytes=memory_bytes), Policy(**settings))  # type: ignore[arg-type]


def names(count: int) -> tuple[str, ...]:
    return tuple(f"node-{number}" for number in range(count))


def owned(plan: Plan) -> dict[Device, frozenset[int]]:
    """Return the holdings of devices once training continues under a plan."""
    return {
        device: frozenset(range(stage.first_layer, stage.end_layer))
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for device in stage.devices
    }


def after(plan: Plan, lost: set[str], joined: tuple[str, ...] = ()) -> Situation:
    left = tuple(n for n in (*plan.nodes, *plan.idle_nodes) if n not in lost)
    return Situation(nodes=left + joined, holdings=owned(plan), previous=plan)


def test_pipelines_shrink_to_their_survivors() -> None:
    assert reinstantiate([4, 3], [3, 3], [2, 3, 4]) == PipelineLayout("simple", ((3, 0), (3, 1)))


def test_a_pipeline_without_survivors_is_gone() -> None:
    assert reinstantiate([2, 3], [0, 3], [2, 3]) == PipelineLayout("simple", ((3, 1),))


def test_borrow_takes_from_the_largest() -> None:
    borrowed = PipelineLayout("borrow", ((2, 0), (3, 1), (3, 2)))
    assert reinstantiate([2, 3, 4], [1, 3, 4], [2, 3, 4]) == borrowed


def test_merge_when_no_pipeline_can_spare_a_node() -> None:
    assert reinstantiate([2, 2, 2], [1, 2, 2], [2, 3]) == PipelineLayout("merge", ((3, 0), (2, 2)))


def test_merge_that_finds_no_template_is_a_dead_end() -> None:
    assert reinstantiate([2, 2], [1, 2], [2]) is None
    assert reinstantiate([2], [1], [2, 3]) is None


def test_survivors_that_a_greedy_merge_would_join_stay_two_pipelines() -> None:
    """f = 1, n₀ = 2, survivors [1, 1, 2]: merging [3, 1] and then [4] would leave one replica; 2 + 2 works."""
    planner = planner_of(tolerate=1)
    planner.precompute(6)
    assert planner.n0 == 2
    start = planner.plan(planner.initial_situation(names(6)))
    assert [len(p.nodes) for p in start.pipelines] == [2, 2, 2]
    situation = after(start, {start.pipelines[0].nodes[0], start.pipelines[1].nodes[1]})
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    assert [len(p.nodes) for p in plan.pipelines] == [2, 2]


def test_where_the_steps_lead_nowhere_intact_pipelines_are_kept() -> None:
    """Two layers on two nodes: three survivors of [2, 2] can neither borrow nor merge."""
    planner = planner_of(layers=2, memory_bytes=20, tolerate=1)
    assert planner.instantiator(4).templates.sizes == (2,)
    start = planner.plan(planner.initial_situation(names(4)))
    situation = after(start, {"node-3"})
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    assert (plan.method, len(plan.pipelines), len(plan.idle_nodes)) == ("keep", 1, 1)
    assert plan.transfers == ()
    assert "idle" in plan.reason


def test_each_method_is_named_and_explained() -> None:
    planner = planner_of(tolerate=1)
    planner.precompute(7)
    start = planner.plan(planner.initial_situation(names(7)))
    assert start.method == "initial"
    assert sorted(len(p.nodes) for p in start.pipelines) == [2, 2, 3]
    small = next(p for p in start.pipelines if len(p.nodes) == 2)
    large = next(p for p in start.pipelines if len(p.nodes) == 3)
    simple = planner.plan(after(start, {large.nodes[0]}))
    assert simple.method == "simple" and large.nodes[0] in simple.reason
    borrow = planner.plan(after(start, {small.nodes[0]}))
    assert borrow.method == "borrow" and "borrowed" in borrow.reason
    merge = planner.plan(after(borrow, {borrow.pipelines[0].nodes[0]}))
    assert merge.method == "merge" and "merged" in merge.reason
    join = planner.plan(after(merge, set(), ("node-9",)))
    assert join.method == "best" and "node-9 joined" in join.reason


def test_the_same_nodes_keep_their_plan_and_refill_what_was_lost() -> None:
    planner = planner_of()
    start = planner.plan(planner.initial_situation(names(4)))
    holdings = owned(start)
    emptied = start.devices[1]
    holdings[emptied] = frozenset()
    situation = Situation(nodes=names(4), holdings=holdings, previous=start)
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    assert plan.method == "unchanged" and plan.pipelines == start.pipelines
    assert {move.target for move in plan.transfers} == {emptied}


def test_a_failure_of_a_whole_pipeline_moves_nothing() -> None:
    planner = planner_of(tolerate=2)
    start = planner.plan(planner.initial_situation(names(6)))
    plan = planner.plan(after(start, set(start.pipelines[1].nodes)))
    assert plan.transfers == ()
    assert [p.stages for p in plan.pipelines] == [start.pipelines[0].stages, start.pipelines[2].stages]


def test_the_fewest_bytes_move() -> None:
    """The survivor that holds most of the first stage becomes the first stage."""
    planner = planner_of(memory_bytes=120, tolerate=0)
    most, rest = frozenset(range(5)), frozenset(range(3, 8))
    holdings = {Device(node="b", index=0): most, Device(node="a", index=0): rest}
    plan = planner.plan(Situation(nodes=("a", "b"), holdings=holdings))
    assert plan.pipelines[0].nodes == ("b", "a")
    assert plan.transfers == ()


def test_sources_are_near_first_and_then_share_the_load() -> None:
    planner = planner_of(layers=4, memory_bytes=None, tolerate=0, devices_per_node=2)
    start = planner.plan(planner.initial_situation(names(3)))
    everything = frozenset(range(4))
    holdings = {Device(node=n, index=i): everything for n in names(3) for i in (0, 1)}
    holdings[Device(node="node-1", index=1)] = frozenset()
    near = planner.plan(Situation(nodes=names(3), holdings=holdings, previous=start))
    assert near.transfers and {move.source.node for move in near.transfers} == {"node-1"}
    far = {d: layers for d, layers in holdings.items() if d.node != "node-1"}
    spread = planner.plan(Situation(nodes=names(3), holdings=far, previous=start))
    load: dict[Device, int] = {}
    for move in spread.transfers:
        load[move.source] = load.get(move.source, 0) + move.size_bytes
    assert len(load) > 1 and max(load.values()) - min(load.values()) <= 12


def test_layers_that_no_node_holds_are_named() -> None:
    planner = planner_of(tolerate=0)
    holdings = {Device(node=n, index=0): frozenset(range(6)) for n in ("a", "b")}
    with pytest.raises(StateLostError, match="layers 6, 7") as raised:
        planner.plan(Situation(nodes=("a", "b"), holdings=holdings))
    assert raised.value.layers == (6, 7)


def test_holdings_of_a_node_that_is_not_usable_count_for_nothing() -> None:
    planner = planner_of(tolerate=0)
    holdings = {Device(node="gone", index=0): frozenset(range(8))}
    with pytest.raises(StateLostError):
        planner.plan(Situation(nodes=("a", "b"), holdings=holdings))


def test_an_idle_node_that_alone_holds_a_layer_is_taken_into_the_plan() -> None:
    planner = planner_of(layers=2, memory_bytes=None, tolerate=0, global_batch=4)
    nodes = ("a", "b", "c")
    holdings = {
        Device(node="a", index=0): frozenset({0}),
        Device(node="b", index=0): frozenset({0}),
        Device(node="c", index=0): frozenset({1}),
    }
    situation = Situation(nodes=nodes, holdings=holdings)
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    assert len(plan.idle_nodes) == 1 and "c" in plan.nodes


def test_the_only_holder_is_chosen_even_where_that_moves_more() -> None:
    """Both slots would be cheapest for a and b, but only c holds layer 1."""
    profile = ModelProfile(layers=(layer(state_bytes=4000), layer(state_bytes=0)), microbatch_rows=4)
    assigner = Assigner(profile)
    holdings = {Device(node=n, index=0): frozenset({0}) for n in "ab"}
    holdings[Device(node="c", index=0)] = frozenset({1})
    masks = assigner.masks("abc", 1, holdings)
    taken = assigner.assign([[((0, 2),)], [((0, 2),)]], "abc", masks, {}).taken
    assert "c" in {node for nodes in taken for node in nodes}


def test_too_few_nodes_say_how_many_are_needed() -> None:
    planner = planner_of(tolerate=1)
    with pytest.raises(TooFewNodesError) as raised:
        planner.plan(planner.initial_situation(names(1)))
    assert (raised.value.needed, raised.value.present) == (2, 1)
    strict = planner_of(tolerate=1, minimum="oobleck")
    with pytest.raises(TooFewNodesError) as raised:
        strict.plan(strict.initial_situation(names(3)))
    assert (raised.value.needed, raised.value.present) == (4, 3)


def test_one_replica_continues_below_oobleck_s_minimum() -> None:
    planner = planner_of(tolerate=1)
    plan = planner.plan(planner.initial_situation(names(3)))
    assert [len(p.nodes) for p in plan.pipelines] == [3]
    assert "one copy" in plan.reason


def test_the_order_of_nodes_and_holdings_does_not_matter() -> None:
    first, second = planner_of(), planner_of()
    start = first.plan(first.initial_situation(names(5)))
    situation = after(start, {"node-2"}, ("node-10", "node-7"))
    shuffled = Situation(
        nodes=tuple(reversed(situation.nodes)),
        holdings=dict(reversed(situation.holdings.items())),
        previous=start,
    )
    assert first.plan(situation) == second.plan(shuffled) == first.plan(situation)


def test_node_names_are_sorted_by_their_numbers() -> None:
    assert sorted(["node-10", "node-2", "a", "node-1"], key=natural_key) == [
        "a",
        "node-1",
        "node-2",
        "node-10",
    ]
    planner = planner_of(memory_bytes=None)
    plan = planner.plan(planner.initial_situation([f"node-{n}" for n in (11, 2, 1, 10)]))
    assert plan.nodes == ("node-1", "node-2", "node-10", "node-11")


def heavy(horizon_s: float | None, lost: set[str], joined: tuple[str, ...] = ()) -> Plan:
    """Return the plan that follows nine nodes as pipelines of 3, 2, 2, 2 after ``lost`` and ``joined``.

    A layer takes 300 ms and 3 GB, which the link moves in 3 s.
    """
    layers = tuple(layer(forward_ms=100, backward_ms=200, state_bytes=4 * 10**9) for _ in range(6))
    free = Link(latency_ms=0.0, bytes_per_s=1e15)
    profile = ModelProfile(
        layers=layers, microbatch_rows=4, link=Link(latency_ms=0.0, bytes_per_s=1e9), ring=free
    )
    planner = Planner(profile, Policy(global_batch=160, microbatch_rows=4))
    start = planner.plan(planner.initial_situation(names(9)))
    assert [len(p.nodes) for p in start.pipelines] == [3, 2, 2, 2]
    situation = replace(after(start, lost, joined), horizon_s=horizon_s)
    plan = planner.plan(situation)
    check_plan(plan, situation, profile, planner.policy)
    chosen = plan.considered[0]
    assert (chosen.method, list(chosen.sizes)) == (plan.method, [len(p.nodes) for p in plan.pipelines])
    assert chosen.transfer_bytes == sum(move.size_bytes for move in plan.transfers)
    assert chosen.iteration_s == plan.estimated_iteration_s
    assert chosen.expected_iteration_s == min(each.expected_iteration_s for each in plan.considered)
    return plan


def test_the_next_failure_decides_between_a_better_plan_and_fewer_bytes() -> None:
    patient, hasty = heavy(3600.0, {"node-1"}), heavy(20.0, {"node-1"})
    assert (patient.method, hasty.method) == ("best", "simple")
    assert patient.estimated_iteration_s < hasty.estimated_iteration_s
    assert len(patient.transfers) > len(hasty.transfers)
    assert "pays within the 60 min expected to the next failure" in patient.reason
    assert "would not pay for its bytes within 20 s" in hasty.reason
    assert heavy(None, {"node-1"}) == patient


def test_a_join_that_the_next_failure_undoes_soon_moves_little() -> None:
    patient, hasty = heavy(3600.0, set(), ("node-9",)), heavy(20.0, set(), ("node-9",))
    assert (patient.method, hasty.method) == ("best", "grow")
    assert [len(p.nodes) for p in hasty.pipelines] == [3, 3, 2, 2]
    assert len(patient.transfers) > len(hasty.transfers)
    assert patient.idle_nodes == hasty.idle_nodes == ()


def test_a_node_that_replaces_another_takes_its_place() -> None:
    plan = heavy(20.0, {"node-4"}, ("node-9",))
    assert plan.method == "grow" and [len(p.nodes) for p in plan.pipelines] == [3, 2, 2, 2]
    assert {move.target.node for move in plan.transfers} == {"node-9"}


def test_expected_time_is_the_steps_that_come_before_an_exponential_failure() -> None:
    """Compare T·e^(t/H) with E[max(0, X − t)] / T by numerical integration."""
    iteration_s, moving_s, horizon_s = 2.0, 30.0, 100.0
    at = np.linspace(0.0, 40 * horizon_s, 400_001)
    density = np.exp(-at / horizon_s) / horizon_s
    steps = np.trapezoid(np.maximum(0.0, at - moving_s) / iteration_s * density, at)
    assert horizon_s / expected_iteration_s(iteration_s, moving_s, horizon_s) == pytest.approx(
        steps, rel=1e-4
    )
    assert expected_iteration_s(iteration_s, moving_s, math.inf) == iteration_s
    assert math.isfinite(expected_iteration_s(iteration_s, 1e9, 0.0))


def test_on_many_nodes_bytes_are_counted_only_where_they_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    every = heavy(3600.0, {"node-1"})
    monkeypatch.setattr("planner.changes.tradeoff.COUNTED_NODES", 5)
    some = heavy(3600.0, {"node-1"})
    assert (some.pipelines, some.transfers) == (every.pipelines, every.transfers)
    assert None not in [each.transfer_bytes for each in every.considered]
    skipped = [each for each in some.considered if each.transfer_bytes is None]
    assert skipped and all(each.transfer_s is None for each in skipped)
    assert all(each.iteration_s > some.considered[0].expected_iteration_s for each in skipped)


def test_each_layout_is_proposed_under_its_name() -> None:
    planner = planner_of(layers=8, memory_bytes=None, tolerate=1)
    instantiator = planner.instantiator(20)

    def proposed(before: list[int], left: list[int], nodes: int) -> dict[str, list[int]]:
        found = candidate_layouts(before, left, nodes, instantiator, planner.policy.microbatches)
        assert len({tuple(sorted(layout.sizes)) for layout in found}) == len(found)
        assert all(sum(layout.sizes) == nodes for layout in found)
        assert sorted(instantiator.best(nodes).sizes) in [sorted(layout.sizes) for layout in found]
        return {layout.method: layout.sizes for layout in reversed(found)}

    lost = proposed([5, 4, 4], [3, 4, 4], 11)
    assert lost["simple"] == [3, 4, 4]
    assert "grow" not in lost
    joined = proposed([5, 4, 4], [3, 4, 4], 14)
    assert joined["grow"] == [5, 5, 4]
    assert joined["keep"][1:3] == [4, 4]
    assert "simple" not in joined
