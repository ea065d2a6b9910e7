"""Any failures and joins, in any order, give a valid plan while one is possible."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.changes.tradeoff import MEMORY_FIT_TOLERANCE
from planner.errors import InfeasibleError, StateLostError, TooFewNodesError
from planner.planner import Planner
from planner.values import Device, Link, ModelProfile, Plan, Policy, Recomputation, Situation
from tests.helpers.oracles import check_plan, layer

Holdings = dict[Device, frozenset[int]]


@st.composite
def planners(draw: st.DrawFn) -> Planner | None:
    rows = draw(st.integers(1, 4))
    layers = tuple(
        layer(
            forward_ms=draw(st.sampled_from([0.0, 1.0, 1.5, 7.0])),
            backward_ms=draw(st.sampled_from([0.0, 2.0, 3.1])),
            state_bytes=draw(st.sampled_from([0, 4, 40])),
            activation_bytes=draw(st.sampled_from([0, 3, 20])),
            output_bytes=draw(st.sampled_from([0, 5])),
            selective=draw(
                st.sampled_from(
                    [
                        Recomputation(activation_bytes=0, recompute_ms=2.5),
                        Recomputation(activation_bytes=6, recompute_ms=0.5),
                        Recomputation(activation_bytes=6, recompute_ms=0.5),
                    ]
                )
            ),
        )
        for _ in range(draw(st.integers(1, 7)))
    )
    profile = ModelProfile(
        layers=layers,
        microbatch_rows=rows,
        device_memory_bytes=draw(st.sampled_from([None, 60, 100, 160])),
        link=Link(latency_ms=0.1, bytes_per_s=1e5),
    )
    policy = Policy(
        devices_per_node=draw(st.sampled_from([1, 1, 2, 3])),
        tolerate=draw(st.integers(0, 2)),
        global_batch=rows * draw(st.integers(1, 10)),
        microbatch_rows=rows,
        minimum=draw(st.sampled_from(["one_replica", "oobleck"])),
        objective=draw(st.sampled_from(["iteration", "paper"])),
        activation_checkpointing=draw(st.sampled_from(["none", "selective", "full", "auto", "auto"])),
        within_node=draw(st.sampled_from(["replicate", "auto", "auto", "shard"])),
    )
    try:
        return Planner(profile, policy)
    except InfeasibleError:
        return None


def owned(plan: Plan, holdings: Holdings, keep_old: bool) -> Holdings:
    """Return the holdings under a plan; until its first commit trainers also keep what they had."""
    kept: Holdings = dict(holdings) if keep_old else {}
    for each in plan.released_layers if keep_old else ():
        kept[each.device] = kept[each.device].difference(each.dropped)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for device in stage.devices:
                layers = frozenset(range(stage.first_layer, stage.end_layer))
                kept[device] = layers | kept.get(device, frozenset())
    return kept


def check_considered(plan: Plan) -> None:
    """Check that the plan is the first that was considered, and that none of the others was expected to be
    quicker.
    """
    if plan.method == "unchanged":
        assert not plan.considered
        return
    chosen = plan.considered[0]
    assert (chosen.method, list(chosen.sizes)) == (plan.method, [len(p.nodes) for p in plan.pipelines])
    assert chosen.iteration_s == plan.estimated_iteration_s
    parts = {
        d: stage.parts for pipeline in plan.pipelines for stage in pipeline.stages for d in stage.devices
    }
    received: Counter[Device] = Counter()
    for move in plan.transfers:
        received[move.target] += move.size_bytes
    assert chosen.transfer_bytes == sum(-(-size // parts[device]) for device, size in received.items())
    expected = [each.expected_iteration_s for each in plan.considered]
    worth = 1 if plan.released_layers else 1 + MEMORY_FIT_TOLERANCE
    assert expected[0] <= min(expected) * worth * (1 + 1e-9) and expected[1:] == sorted(expected[1:])
    assert len({tuple(sorted(each.sizes)) for each in plan.considered}) == len(expected)
    assert len({sum(each.sizes) for each in plan.considered}) == 1


@given(planners(), st.data())
@settings(max_examples=100)
@pytest.mark.long
def test_any_history_of_failures_and_joins(planner: Planner | None, data: st.DataObject) -> None:
    if planner is None:
        return
    draw = data.draw
    alive = {f"n{number}" for number in range(draw(st.integers(1, 9)))}
    holdings: Holdings = dict(planner.initial_situation(sorted(alive)).holdings)
    previous: Plan | None = None
    for turn in range(draw(st.integers(1, 8))):
        horizon_s = draw(st.sampled_from([None, 0.001, 1.0, 1e6]))
        situation = Situation(
            nodes=tuple(sorted(alive)),
            holdings=holdings,
            previous=previous,
            horizon_s=horizon_s,
            in_memory=previous is not None,
        )
        held = frozenset().union(*(layers for device, layers in holdings.items() if device.node in alive))
        try:
            plan = planner.plan(situation)
        except TooFewNodesError as error:
            assert len(alive) < error.needed == planner.fewest_nodes
        except StateLostError as error:
            lost = set(range(len(planner.profile.layers))) - held
            assert set(error.layers) == lost and lost
            return
        else:
            check_plan(plan, situation, planner.profile, planner.policy)
            enough = min(planner.policy.tolerate + 1, len(alive) // planner.n0, planner.policy.microbatches)
            assert plan.method == "unchanged" or len(plan.pipelines) >= enough
            assert planner.plan(situation) == plan
            check_considered(plan)
            previous = plan
            holdings = owned(plan, holdings, draw(st.booleans()))
        gone = draw(st.sets(st.sampled_from(sorted(alive)), max_size=max(0, len(alive) - 1)))
        come = {f"new{turn}-{number}" for number in range(draw(st.integers(0, 2)))}
        alive = (alive - gone) | come
        holdings = {device: layers for device, layers in holdings.items() if device.node in alive}
