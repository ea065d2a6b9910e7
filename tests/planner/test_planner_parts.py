"""ZeRO-1: devices that together have all of a layer; what a plan must cover, moves, and takes of memory."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.changes.cover import cover
from planner.changes.parts import incomplete, moved_bytes, part_needs
from planner.errors import StateLostError, TooFewNodesError
from planner.planner import Planner
from planner.preview import preview
from planner.stages.memory import MemoryModel
from planner.values import (
    Device,
    LayerProfile,
    Mode,
    ModelProfile,
    PipelinePlacement,
    Policy,
    Situation,
    StagePlacement,
    StatePart,
)

LAYERS = 3


def device(node: str) -> Device:
    return Device(node=node, index=0)


def part(layer: int, number: int, parts: int, *, replica: bool = False) -> StatePart:
    return StatePart(layer=layer, start=number, end=number + 1, of=parts, replica=replica)


@st.composite
def reported(draw: st.DrawFn) -> dict[Device, tuple[StatePart, ...]]:
    """Draw up to five nodes with ranges of layers that are cut in one way, or in two."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    any_part = st.tuples(st.integers(0, LAYERS - 1), st.sampled_from(counts), st.booleans()).flatmap(
        lambda some: st.sets(st.integers(0, some[1]), min_size=2, max_size=2).map(
            lambda bounds: StatePart(
                layer=some[0], start=min(bounds), end=max(bounds), of=some[1], replica=some[2]
            )
        )
    )
    names = "abcde"[: draw(st.integers(1, 5))]
    return {device(name): tuple(draw(st.lists(any_part, max_size=6))) for name in names}


def elements(parts: tuple[StatePart, ...], layer: int, count: int) -> set[int]:
    """Return the elements of a layer that the parts have, one by one (the oracle)."""
    return {
        n for p in parts if p.layer == layer for n in range(p.start * count // p.of, p.end * count // p.of)
    }


@given(reported(), st.integers(1, 60))
def test_what_counts_as_complete_is_complete_in_elements(
    reports: dict[Device, tuple[StatePart, ...]], count: int
) -> None:
    lacking = incomplete(reports.values(), LAYERS)
    for layer in range(LAYERS):
        there: set[int] = set().union(*(elements(parts, layer, count) for parts in reports.values()))
        if layer not in lacking:
            assert there == set(range(count))
        elif count % 12 == 0:  # No part of up to four is empty.
            assert there != set(range(count))


@given(reported(), st.integers(1, 5))
@pytest.mark.long
def test_a_cover_is_found_exactly_where_there_is_one(
    reports: dict[Device, tuple[StatePart, ...]], most: int
) -> None:
    nodes = sorted(holder.node for holder in reports)
    needs = part_needs(nodes, 1, reports, LAYERS)
    exists = any(
        not incomplete([reports[device(node)] for node in some], LAYERS)
        for size in range(1, most + 1)
        for some in combinations(nodes, size)
    )
    try:
        found = cover(nodes, needs, most)
    except StateLostError as error:
        assert not exists
        assert set(error.layers) <= set(range(LAYERS)) and error.layers
    else:
        assert exists and len(found) <= most
        assert not incomplete([reports[device(node)] for node in found], LAYERS)


# --- plans ---------------------------------------------------------------------------------------

LAYER = LayerProfile(
    forward_ms=10.0,
    backward_ms=20.0,
    parameter_bytes=1000,
    gradient_bytes=1000,
    optimizer_bytes=2000,
    activation_bytes=10,
    output_bytes=10,
)


def profile(limit_bytes: int | None = None) -> ModelProfile:
    return ModelProfile(layers=(LAYER,) * 4, microbatch_rows=1, device_memory_bytes=limit_bytes)


def policy(*, zero1: bool = True, tolerate: int = 1) -> Policy:
    return Policy(global_batch=8, microbatch_rows=1, tolerate=tolerate, zero1=zero1)


def own(number: int, parts: int, *, replica: bool = False) -> tuple[StatePart, ...]:
    return tuple(part(layer, number, parts, replica=replica) for layer in range(4))


def lost_one(*, aor: bool) -> Situation:
    """Return a situation of three one-node pipelines that lost ``b``; no node has gathered the last step."""
    parts = {
        device("a"): own(0, 3) + (own(1, 3, replica=True) if aor else ()),
        device("c"): own(2, 3) + (own(0, 3, replica=True) if aor else ()),
    }
    planner = Planner(profile(), policy())
    before = planner.plan(planner.initial_situation(["a", "b", "c"]))
    assert len(before.pipelines) == 3
    holdings = dict.fromkeys(parts, frozenset[int]())
    return Situation(nodes=("a", "c"), holdings=holdings, previous=before, parts=parts)


def test_a_lost_part_is_lost_state_unless_there_is_a_replica() -> None:
    planner = Planner(profile(), policy())
    with pytest.raises(StateLostError, match="layers 0, 1, 2, 3") as caught:
        planner.plan(lost_one(aor=False))
    assert caught.value.layers == (0, 1, 2, 3)
    plan = planner.plan(lost_one(aor=True))
    assert plan.transfers == () and set(plan.nodes) == {"a", "c"}
    lacking = moved_bytes(profile(), plan.pipelines, {}, lost_one(aor=True).parts or {}, zero1=True)
    assert plan.part_bytes == lacking > 0


def test_whole_parameters_do_not_make_up_for_a_lost_part() -> None:
    situation = lost_one(aor=False)
    everything = dict.fromkeys(situation.holdings, frozenset(range(4)))
    with pytest.raises(StateLostError):
        Planner(profile(), policy()).plan(
            Situation(
                nodes=situation.nodes, holdings=everything, previous=situation.previous, parts=situation.parts
            )
        )


def test_a_plan_with_places_to_spare_uses_the_nodes_that_have_all_parts() -> None:
    """One microbatch is one pipeline, and four layers are at most four nodes of the five."""
    parts = {device(name): own(number % 4, 4) for number, name in enumerate("abcde")}
    narrow = Policy(global_batch=1, microbatch_rows=1, tolerate=0, zero1=True)
    holdings = dict.fromkeys(parts, frozenset(range(4)))
    plan = Planner(profile(), narrow).plan(Situation(nodes=tuple("abcde"), holdings=holdings, parts=parts))
    used = [parts[holder] for holder in plan.devices]
    assert len(plan.nodes) == 4 and not incomplete(used, 4)


def placed(*nodes: str) -> tuple[PipelinePlacement, ...]:
    return tuple(
        PipelinePlacement(
            stages=(StagePlacement(first_layer=0, end_layer=4, devices=(device(node),)),),
            first_microbatch=0,
            microbatches=1,
            estimated_s=1.0,
        )
        for node in nodes
    )


def test_bytes_that_move_are_what_is_lacking() -> None:
    whole = {device("a"): frozenset(range(4)), device("b"): frozenset(range(4))}
    halves = {device("a"): own(0, 2), device("b"): own(1, 2)}
    assert moved_bytes(profile(), placed("a", "b"), whole, halves, zero1=True) == 0
    assert moved_bytes(profile(), placed("b", "a"), whole, halves, zero1=True) == 4 * 2000
    assert moved_bytes(profile(), placed("a"), whole, halves, zero1=True) == 4 * 1000
    assert moved_bytes(profile(), placed("a"), {}, halves, zero1=True) == 4 * (1000 + 500)
    assert moved_bytes(profile(), placed("c"), whole, halves, zero1=True) == 4 * 3000
    both = {device("a"): own(0, 2) + own(1, 2, replica=True)}
    assert moved_bytes(profile(), placed("a"), {}, both, zero1=True) == 0


@given(reported(), st.integers(1, 4))
@pytest.mark.long
def test_bytes_that_move_are_counted_element_by_element(
    reports: dict[Device, tuple[StatePart, ...]], owners: int
) -> None:
    """The ranges have any cuts, and pipelines have one node each. Layers have 12 elements, so that no element
    is divided.
    """
    whole = {holder: frozenset({0}) for holder in reports}
    lacking = 0
    for number, name in enumerate("abcd"[:owners]):
        parts = reports.get(device(name), ())
        own = set(range(number * 12 // owners, (number + 1) * 12 // owners))
        for layer in range(4):
            has = elements(parts, layer, 12)
            lacking += len(own - has) * 24
            if not (layer == 0 and device(name) in whole):
                lacking += (12 - len(has)) * 12
    small = replace(LAYER, parameter_bytes=144, optimizer_bytes=288)
    model = ModelProfile(layers=(small,) * 4, microbatch_rows=1)
    assert moved_bytes(model, placed(*"abcd"[:owners]), whole, reports, zero1=True) == lacking


def test_equal_ranges_are_equal() -> None:
    assert StatePart(layer=1, start=2, end=4, of=8) == StatePart(layer=1, start=1, end=2, of=4)
    assert StatePart(layer=1, start=0, end=3, of=3) == StatePart(layer=1, start=0, end=1, of=1)
    assert StatePart(layer=1, start=0, end=3, of=3).is_whole
    assert not StatePart(layer=1, start=1, end=3, of=3).is_whole


# --- memory --------------------------------------------------------------------------------------


def test_a_device_keeps_one_of_so_many_parts_of_the_optimizer_s_state() -> None:
    def state(policy: Policy) -> int:
        return MemoryModel(profile(), policy).stage_bytes(0, 4, 1, 0, Mode("none"))

    assert state(policy(zero1=False)) - state(policy()) == 4 * 1000
    assert state(policy(zero1=False)) - state(policy(tolerate=3)) == 4 * 1500


def test_sharded_state_makes_a_replica_fit_on_fewer_nodes_and_needs_all_replicas() -> None:
    """A layer takes 4000 bytes and 10 or 40 of activations, with ZeRO-1 3000: two, or three, of four fit."""
    tight = profile(9300)
    assert Planner(tight, policy(zero1=False)).n0 == 2
    assert Planner(tight, policy(zero1=False)).fewest_nodes == 2
    tighter = profile(6300)
    plain, sharded = Planner(tighter, policy(zero1=False)), Planner(tighter, policy())
    assert (plain.n0, plain.fewest_nodes) == (4, 4)
    assert (sharded.n0, sharded.fewest_nodes) == (2, 4)
    with pytest.raises(TooFewNodesError, match="4 are needed"):
        sharded.plan(sharded.initial_situation(["a", "b", "c"]))
    assert len(sharded.plan(sharded.initial_situation(list("abcd"))).pipelines) == 2
    assert preview(tighter, policy(), 4).instantiation.sizes == (2, 2)


def test_one_pipeline_may_continue_where_sharding_saves_no_node() -> None:
    planner = Planner(profile(), policy())
    assert (planner.n0, planner.fewest_nodes) == (1, 1)
    with pytest.raises(TooFewNodesError, match=r"0 nodes are usable and 1 is needed$"):
        planner.plan(planner.initial_situation([]))
    assert not planner.costs.policy.zero1
    assert Planner(profile(9300), policy()).fewest_nodes == 2
