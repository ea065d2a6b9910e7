"""Rank assignments, routes, owners, and plans that contradict themselves."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.groups.communicator import member_range
from runtime.layers.world import (
    WorldError,
    check_world,
    communication_edges,
    owners_of_layer,
    rank_assignment,
    replica_ranks,
    replicated_layers,
)
from runtime.snapshots.groups import layer_groups
from statemachine.messages.trainer import TransferData, WorldData, WorldPipeline, WorldStage
from tests.helpers.harness import pipeline


def world(*pipelines: WorldPipeline, size: int, transfers: tuple[TransferData, ...] = ()) -> WorldData:
    return WorldData(pipelines=pipelines, transfers=transfers, hosts=("127.0.0.1",) * size)


GOOD = world(
    pipeline((0, 1, [0]), (1, 3, [1, 2]), first_microbatch=0, microbatches=3),
    pipeline((0, 3, [3]), first_microbatch=3, microbatches=1),
    size=4,
)


def test_assignments_and_owners() -> None:
    check_world(GOOD, layers=3, microbatches=4)
    first, second, third, alone = (rank_assignment(GOOD, rank, 4) for rank in range(4))
    assert first.is_first and not first.is_last and alone.is_first and alone.is_last
    assert [(r.peer, r.start, r.end) for r in first.activations_to] == [(1, 0, 2), (2, 2, 4)]
    assert [(r.peer, r.start, r.end) for r in third.activations_from] == [(0, 0, 2)]
    assert (second.first_row, second.rows, third.first_row, third.rows) == (0, 2, 2, 2)
    assert (alone.first_microbatch, list(alone.layers), alone.activations_from) == (3, [0, 1, 2], ())
    assert owners_of_layer(GOOD) == {0: (0, 3), 1: (1, 2, 3), 2: (1, 2, 3)}
    with pytest.raises(WorldError, match="rank 7 is not in the plan"):
        rank_assignment(GOOD, 7, 4)


def test_replicas_of_tensor_parallel_devices_have_their_own_rows() -> None:
    """The first device of each replica passes its rows on; coupled rows stay on the first replica."""
    stage = WorldStage(first_layer=0, end_layer=1, ranks=(0, 1, 2, 3), within="tensor", replicas=2)
    last = WorldStage(first_layer=1, end_layer=3, ranks=(4, 5))
    plan = world(WorldPipeline(stages=(stage, last), first_microbatch=0, microbatches=1), size=6)
    found = [rank_assignment(plan, rank, 5) for rank in range(6)]
    assert [(a.first_row, a.rows, a.is_representative) for a in found[:4]] == [
        (0, 2, True),
        (0, 2, False),
        (2, 3, True),
        (2, 3, False),
    ]
    assert [[route.peer for route in a.activations_to] for a in found[:4]] == [[4], [], [5], []]
    assert [[route.peer for route in a.gradients_from] for a in found[:4]] == [[4], [4], [5], [5]]
    coupled = [rank_assignment(plan, rank, 5, coupled=True) for rank in range(4)]
    assert [(a.rows, a.is_representative) for a in coupled] == [(5, True), (5, False), (0, False), (0, False)]
    assert replica_ranks(stage, 3) == (2, 3) and replica_ranks(last, 4) == (4,)
    assert replicated_layers(plan) == {0, 1, 2} and replicated_layers(plan, whole=True) == {1, 2}
    names = tuple("a" for _ in range(6))
    groups = [layer_groups(plan, names, rank, "none", (8, 8, 8)) for rank in range(4)]
    assert [[group.device for group in of_rank] for of_rank in groups] == [[0], [1], [], []]


@pytest.mark.parametrize("rows", [1, 4])
def test_communication_edges_follow_from_the_assignments(rows: int) -> None:
    moved = (TransferData(layer=1, source=3, target=1), TransferData(layer=2, source=3, target=1))
    plan = world(*GOOD.pipelines, size=4, transfers=moved)
    met = {
        (rank, route.peer) for rank in range(4) for route in rank_assignment(plan, rank, rows).activations_to
    }
    edges = communication_edges(plan, rows)
    assert edges == {
        ("state", 3, 1),
        *(("activation", one, other) for one, other in met),
        *(("gradient", other, one) for one, other in met),
    }


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_every_row_goes_from_one_device_to_one_device(rows: int, before: int, after: int) -> None:
    ranks = list(range(before + after))
    plan = world(
        pipeline((0, 1, ranks[:before]), (1, 2, ranks[before:]), first_microbatch=0, microbatches=1),
        size=before + after,
    )
    assert [member_range(rows, i, before)[1] for i in range(before - 1)] == [
        member_range(rows, i, before)[0] for i in range(1, before)
    ]
    sent: list[tuple[int, int, int, int]] = []
    received: list[tuple[int, int, int, int]] = []
    for rank in ranks:
        assignment = rank_assignment(plan, rank, rows)
        for route in assignment.activations_to:
            sent.append(
                (rank, route.peer, assignment.first_row + route.start, assignment.first_row + route.end)
            )
        for route in assignment.activations_from:
            received.append(
                (route.peer, rank, assignment.first_row + route.start, assignment.first_row + route.end)
            )
    assert sorted(sent) == sorted(received)
    spans = sorted((start, end) for _, _, start, end in sent)
    assert spans[0][0] == 0 and spans[-1][1] == rows
    assert all(left[1] == right[0] for left, right in pairwise(spans))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (world(pipeline((0, 2, [0]), first_microbatch=0, microbatches=4), size=1), "ends at layer 2"),
        (
            world(pipeline((0, 1, [0]), (2, 3, [1]), first_microbatch=0, microbatches=4), size=2),
            "follows layer 1",
        ),
        (world(pipeline((0, 3, []), first_microbatch=0, microbatches=4), size=0), "follows layer 0"),
        (world(pipeline((0, 3, [0]), first_microbatch=1, microbatches=3), size=1), "a gap or an overlap"),
        (world(pipeline((0, 3, [0]), first_microbatch=0, microbatches=3), size=1), "compute 3 microbatches"),
        (world(pipeline((0, 3, [0]), first_microbatch=0, microbatches=4), size=2), "hosts for 2"),
        (
            world(
                pipeline((0, 3, [0]), first_microbatch=0, microbatches=4),
                size=1,
                transfers=(TransferData(layer=0, source=0, target=0),),
            ),
            "impossible transfer",
        ),
    ],
)
def test_contradictions_are_reported(wrong: WorldData, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        check_world(wrong, layers=3, microbatches=4)
