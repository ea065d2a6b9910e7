"""Old and new layers on a device together, until a plan's first commit."""

from random import Random

import pytest
from msgspec.structs import replace

from planner.changes.assignment import Assigner
from planner.changes.candidates import PipelineLayout, candidate_layouts
from planner.changes.cover import Masks, whole_layers
from planner.changes.tradeoff import MEMORY_FIT_TOLERANCE, CandidatePlan, choose_layout
from planner.changes.transition import parts_to_release
from planner.planner import Planner
from planner.values import (
    Device,
    PipelinePlacement,
    Plan,
    Policy,
    ReleasedLayers,
    Situation,
    StagePlacement,
    StatePart,
)
from statemachine.cluster.sharding import parts_by_device
from tests.helpers.oracles import check_plan, layer, profile_of


def planner_of(layers: int = 8, memory_bytes: int | None = 120, **changes: object) -> Planner:
    """Return a planner whose layers take 12 bytes, 9 of which move, and 4 for each microbatch in flight."""
    settings: dict[str, object] = {"global_batch": 64, "microbatch_rows": 4, **changes}
    return Planner(profile_of([1.0] * layers, memory_bytes=memory_bytes), Policy(**settings))  # type: ignore[arg-type]


def names(count: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(count))


def owned(plan: Plan) -> dict[Device, frozenset[int]]:
    return {
        device: frozenset(range(stage.first_layer, stage.end_layer))
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for device in stage.devices
    }


def after(plan: Plan, lost: set[str], *joined: str) -> Situation:
    left = tuple(node for node in plan.nodes if node not in lost)
    return Situation(nodes=(*left, *joined), holdings=owned(plan), previous=plan)


def tight(**changes: object) -> Planner:
    """Return a planner for eight layers of 40 bytes, 30 of which move; a device has room for three and nothing
    else.
    """
    profile = replace(profile_of([1.0] * 8), device_memory_bytes=130)
    profile = replace(profile, layers=(layer(state_bytes=40, activation_bytes=1),) * 8)
    settings: dict[str, object] = {"global_batch": 64, "microbatch_rows": 4, **changes}
    return Planner(profile, Policy(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipelines", "tolerate", "parks", "drops"),
    [(1, 0, True, False), (2, 1, False, True), (2, 2, True, True), (3, 2, False, True)],
)
def test_layers_are_dropped_where_enough_others_hold_them_and_parked_elsewhere(
    pipelines: int, tolerate: int, parks: bool, drops: bool
) -> None:
    """Full stages hold the previous layer, too: f + 1 nodes must keep it, and two at least."""
    planner = tight(tolerate=tolerate)
    start = planner.plan(replace(planner.initial_situation(names(3 * pipelines))))
    holdings = {
        device: layers | {min(layers) - 1} if len(layers) == 3 and min(layers) > 0 else layers
        for device, layers in owned(start).items()
    }
    situation = Situation(nodes=start.nodes, holdings=holdings, previous=start)
    plan = planner.plan(situation)
    check_plan(plan, situation, planner.profile, planner.policy)
    assert plan.pipelines == start.pipelines and len(plan.pipelines) == pipelines
    assert any(each.parked for each in plan.released_layers) == parks
    assert any(each.dropped for each in plan.released_layers) == drops
    assert ("in host memory to have room until the first step" in plan.reason) == parks
    assert ("old layers, which others hold, to have room" in plan.reason) == drops


def test_no_limit_and_no_memory_taken_release_nothing() -> None:
    unlimited = planner_of(memory_bytes=None)
    assert (
        unlimited.plan(after(unlimited.plan(unlimited.initial_situation(names(4))), {"n0"})).released_layers
        == ()
    )
    planner = tight()
    start = planner.plan(planner.initial_situation(names(8)))
    lost = after(start, {start.pipelines[0].nodes[0]})
    assert planner.plan(lost).released_layers
    assert planner.plan(replace(lost, in_memory=False)).released_layers == ()


def test_of_two_slots_a_node_takes_the_one_with_room_for_its_old_layers() -> None:
    """Both move as many bytes, and the node was in the slot without room."""
    assigner = Assigner(profile_of([1.0] * 4))
    masks = {"a": (0b1111,), "b": (0b0011,)}
    pipelines, habits = [[((0, 2),)], [((0, 2),)]], {"a": (0, 0), "b": (1, 0)}
    assert assigner.assign(pipelines, "ab", masks, habits).taken == (("a",), ("b",))
    tight = assigner.assign(pipelines, "ab", masks, habits, rooms=[[(5,)], [(18,)]])
    assert tight.taken == (("b",), ("a",)) and tight.excess_bytes == 0
    both = assigner.assign(pipelines, "ab", masks, habits, rooms=[[(5,)], [(6,)]])
    assert both.taken == (("b",), ("a",)) and both.excess_bytes == 12


def test_each_device_of_a_node_counts_separately() -> None:
    assigner = Assigner(profile_of([1.0] * 4))
    masks = {"a": (0b1100, 0b0011)}
    found = assigner.assign([[((0, 2), (2, 4))]], "a", masks, {}, rooms=[[(0, 0)]])
    assert found.excess_bytes == 0 == found.moved_bytes
    wider = {"a": (0b1110, 0b0011)}
    assert assigner.assign([[((0, 2), (2, 4))]], "a", wider, {}, rooms=[[(0, 0)]]).excess_bytes == 9


def test_a_layout_with_room_is_taken_where_its_steps_take_nearly_as_long() -> None:
    """Losses of all kinds are drawn: a plan whose devices park or drop is taken only where no other is nearly
    as quick.
    """
    preferred = 0
    for seed in range(20):
        random = Random(seed)
        planner = tight(tolerate=0, global_batch=random.choice([64, 256]))
        nodes = names(random.randint(6, 12))
        ranges = [frozenset(range(first, first + random.randint(2, 3))) for first in range(0, 8, 2)]
        holdings = {
            Device(node=node, index=0): ranges[number] if number < 4 else random.choice(ranges)
            for number, node in enumerate(nodes)
        }
        previous = planner.plan(planner.initial_situation(names(13)))
        masks = Assigner(planner.profile).masks(nodes, 1, holdings)
        among = layouts_after(planner, previous, nodes)
        weighed = [weigh_among(planner, [layout], nodes, masks, previous) for layout in among]
        chosen = weigh_among(planner, among, nodes, masks, previous)
        least_s = min(each.considered.expected_iteration_s for each in weighed)
        roomy = [each for each in weighed if not each.assignment.excess_bytes]
        near = [e for e in roomy if e.considered.expected_iteration_s <= least_s * (1 + MEMORY_FIT_TOLERANCE)]
        assert bool(near) == (not chosen.assignment.excess_bytes)
        assert chosen.considered.expected_iteration_s <= least_s * (1 + MEMORY_FIT_TOLERANCE) * (1 + 1e-9)
        refused = [each for each in weighed if each.considered.expected_iteration_s <= least_s * (1 + 1e-9)]
        preferred += bool(near) and any(each.assignment.excess_bytes for each in refused)
    assert preferred


def layouts_after(planner: Planner, previous: Plan, nodes: tuple[str, ...]) -> list[PipelineLayout]:
    return candidate_layouts(
        before=[len(pipeline.nodes) for pipeline in previous.pipelines],
        left=[sum(node in nodes for node in pipeline.nodes) for pipeline in previous.pipelines],
        nodes=len(nodes),
        instantiator=planner.instantiator(len(nodes)),
        most=planner.policy.microbatches,
    )


def weigh_among(
    planner: Planner, among: list[PipelineLayout], nodes: tuple[str, ...], masks: Masks, previous: Plan
) -> CandidatePlan:
    return choose_layout(
        among,
        instantiator=planner.instantiator(len(nodes)),
        assigner=Assigner(planner.profile),
        nodes=nodes,
        masks=masks,
        needs=whole_layers(masks, 8),
        earlier=[pipeline.nodes for pipeline in previous.pipelines],
        link=planner.profile.link,
        horizon_s=1e6,
        memory=planner.costs.memory,
    )[0]


# --- state in parts ----------------------------------------------------------------------------------


def sharded_pipeline(node: str, *ends: int, devices: int) -> PipelinePlacement:
    """Return a pipeline within one node, whose stages hold shards on ``devices`` devices each."""
    stages = tuple(
        StagePlacement(
            first_layer=first,
            end_layer=end,
            devices=tuple(Device(node=node, index=number * devices + index) for index in range(devices)),
            within="shard" if devices > 1 else "replicate",
        )
        for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
    )
    return PipelinePlacement(stages=stages, first_microbatch=0, microbatches=8, estimated_s=1.0)


def released(
    before: list[PipelinePlacement], after: list[PipelinePlacement], limit: int, *, zero1: bool = False
) -> dict[Device, ReleasedLayers]:
    """Return what devices release between these plans, of four layers with 10 bytes of parameters and of
    gradients, and 20 of optimizer state.
    """
    profile = replace(profile_of([1.0] * 4), layers=(layer(state_bytes=40, activation_bytes=0),) * 4)
    policy = Policy(
        global_batch=64,
        microbatch_rows=4,
        devices_per_node=4,
        zero1=zero1,
        tolerate=0,
        within_node="shard",
        device_memory_bytes=limit,
    )
    planner = Planner(profile, policy)
    start = planner.plan(planner.initial_situation(names(1)))
    parts = parts_by_device(replace(start, pipelines=tuple(before)), zero1=zero1)
    found = parts_to_release(
        profile,
        planner.costs.memory,
        after,
        {},
        {device: tuple(sorted(of)) for device, of in parts.items()},
        policy.tolerate,
        zero1=zero1,
    )
    return {each.device: each for each in found}


def test_parts_that_change_are_parked_where_old_and_new_do_not_fit() -> None:
    """Quarters of four layers take 4 · 8 bytes of state that moves; halves of two layers take 40 bytes, and
    gathering 30.
    """
    quarters, halves = [sharded_pipeline("n0", 4, devices=4)], [sharded_pipeline("n0", 2, 4, devices=2)]
    assert released(quarters, halves, 70 + 32) == {}
    tight = released(quarters, halves, 70 + 16)
    assert len(tight) == 4
    assert all(len(each.parked) == 2 and not each.dropped for each in tight.values())
    assert {each.parked for each in released(quarters, halves, 70).values()} == {(0, 1, 2, 3)}
    assert released(quarters, quarters, 70) == {}, "ranges that stay the same take no more memory"


def test_parts_are_dropped_where_other_nodes_have_all_of_a_layer() -> None:
    """Under ZeRO-1 no node has all of a layer's optimizer state."""
    nodes = names(3)
    before = [sharded_pipeline(node, 4, devices=4) for node in nodes]
    after = [sharded_pipeline("n0", 2, 4, devices=2), *before[1:]]
    found = released(before, after, 70)
    assert set(found) == {Device(node="n0", index=index) for index in range(4)}
    assert {(each.dropped, each.parked) for each in found.values()} == {((2, 3), (0, 1)), ((0, 1), (2, 3))}
    assert all(not each.dropped for each in released(before, after, 60, zero1=True).values())


def test_replicas_in_host_memory_take_no_memory_of_devices() -> None:
    quarters, halves = [sharded_pipeline("n0", 4, devices=4)], [sharded_pipeline("n0", 2, 4, devices=2)]
    profile = replace(profile_of([1.0] * 4), layers=(layer(state_bytes=40, activation_bytes=0),) * 4)
    policy = Policy(
        global_batch=64, microbatch_rows=4, devices_per_node=4, within_node="shard", device_memory_bytes=70
    )
    replicas = {
        device: tuple(StatePart(layer=n, start=0, end=1, of=1, replica=True) for n in range(4))
        for stage in quarters[0].stages
        for device in stage.devices
    }
    memory = Planner(profile, policy).costs.memory
    assert parts_to_release(profile, memory, halves, {}, replicas, 0, zero1=True) == ()
