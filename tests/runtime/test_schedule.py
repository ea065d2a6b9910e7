"""Schedules as data: complete, executable without deadlock, within their memory bounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.schedule import (
    MAX_UNRECEIVED,
    AwaitReceived,
    Backward,
    Forward,
    ForwardOperation,
    Operation,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    forward_only,
    one_f_one_b,
)

STAGES = st.integers(1, 8)
MICROBATCHES = st.integers(0, 20)


def computations(operations: tuple[Operation, ...]) -> str:
    """Return the computations as ``F0 B0 …``, without communication."""
    names = {Forward: "F", Backward: "B"}
    return " ".join(f"{names[type(o)]}{o.microbatch}" for o in operations if type(o) in names)


def execute(stages: int, microbatches: int) -> list[Operation]:
    """Run all stages with sends that never block and receives that wait; return the operations that ran, in
    order.
    """
    lists = [list(one_f_one_b(stage, stages, microbatches)) for stage in range(stages)]
    mail: set[tuple[str, int, int]] = set()
    ran: list[Operation] = []

    def ready(stage: int, operation: Operation) -> bool:
        match operation:
            case ReceiveActivation(m):
                return ("activation", stage, m) in mail
            case ReceiveGradient(m):
                return ("gradient", stage, m) in mail
            case SendActivation(m):
                mail.add(("activation", stage + 1, m))
            case SendGradient(m):
                mail.add(("gradient", stage - 1, m))
        return True

    moved = True
    while moved:
        moved = False
        for stage, operations in enumerate(lists):
            while operations and ready(stage, operations[0]):
                ran.append(operations.pop(0))
                moved = True
    assert not any(lists), f"deadlock; left: {lists}"
    return ran


def test_four_stages_eight_microbatches_as_in_the_paper() -> None:
    assert [computations(one_f_one_b(stage, 4, 8)) for stage in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert [computations(one_f_one_b(stage, 4, 2)) for stage in range(4)] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_one_stage_does_not_communicate() -> None:
    assert set(map(type, one_f_one_b(0, 1, 3))) == {Forward, Backward}


def test_receives_precede_their_use_and_sends_follow_their_source() -> None:
    assert one_f_one_b(1, 3, 1) == (
        ReceiveActivation(0),
        Forward(0),
        SendActivation(0),
        ReceiveGradient(0),
        Backward(0),
        SendGradient(0),
    )


@given(STAGES, MICROBATCHES)
def test_all_stages_together_finish(stages: int, microbatches: int) -> None:
    ran = execute(stages, microbatches)
    assert sum(isinstance(o, Backward) for o in ran) == stages * microbatches


@given(STAGES, MICROBATCHES, st.data())
def test_each_stage_runs_every_microbatch_once_in_order_within_its_memory(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    operations = one_f_one_b(stage, stages, microbatches)
    in_flight: list[int] = []
    most = 0
    forwards: list[int] = []
    backwards: list[int] = []
    for operation in operations:
        match operation:
            case Forward(m):
                forwards.append(m)
                in_flight.append(m)
            case Backward(m):
                backwards.append(m)
                in_flight.remove(m)
        most = max(most, len(in_flight))
    assert forwards == backwards == list(range(microbatches))
    assert most == min(stages - stage, microbatches)


@given(st.integers(2, 8), st.integers(1, 20))
def test_neighbours_send_and_receive_in_the_same_order(stages: int, microbatches: int) -> None:
    lists = [one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    for left, right in itertools.pairwise(lists):
        down = [o.microbatch for o in left if isinstance(o, SendActivation)]
        up = [o.microbatch for o in right if isinstance(o, SendGradient)]
        assert down == [o.microbatch for o in right if isinstance(o, ReceiveActivation)]
        assert up == [o.microbatch for o in left if isinstance(o, ReceiveGradient)]


@pytest.mark.parametrize(("stage", "stages", "microbatches"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, -1)])
def test_invalid_arguments_are_rejected(stage: int, stages: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"stage|microbatches"):
        one_f_one_b(stage, stages, microbatches)


# --- forward only --------------------------------------------------------------------------------


def test_forward_only_waits_until_the_next_stage_has_received_activations() -> None:
    assert forward_only(1, 3, [4, 5, 7]) == (
        ReceiveActivation(4),
        Forward(4),
        SendActivation(4),
        ReceiveActivation(5),
        Forward(5),
        SendActivation(5),
        AwaitReceived(4),
        ReceiveActivation(7),
        Forward(7),
        SendActivation(7),
    )
    assert forward_only(0, 1, range(3)) == (Forward(0), Forward(1), Forward(2))
    assert set(map(type, forward_only(2, 3, range(9)))) == {ReceiveActivation, Forward}
    assert forward_only(1, 3, ()) == ()


@given(STAGES, MICROBATCHES, st.data())
def test_forward_only_ends_in_any_order_of_events_within_its_memory(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    """Whichever stage continues next, the activations on their way to a stage never exceed the limit."""
    lists: list[list[ForwardOperation]] = [
        list(forward_only(stage, stages, range(microbatches))) for stage in range(stages)
    ]
    on_the_way: list[list[int]] = [[] for _ in range(stages)]
    """Transfers by receiving stage."""

    def ready(stage: int) -> bool:
        match lists[stage][:1]:
            case [ReceiveActivation()]:
                return bool(on_the_way[stage])
            case [AwaitReceived(microbatch)]:
                return microbatch not in on_the_way[stage + 1]
            case other:
                return bool(other)

    while any(lists):
        able = [stage for stage in range(stages) if ready(stage)]
        assert able, f"deadlock; left: {lists}"
        stage = data.draw(st.sampled_from(able))
        match lists[stage].pop(0):
            case ReceiveActivation(microbatch):
                assert on_the_way[stage].pop(0) == microbatch
            case SendActivation(microbatch):
                on_the_way[stage + 1].append(microbatch)
                assert len(on_the_way[stage + 1]) <= MAX_UNRECEIVED


def test_forward_only_of_no_stage_is_rejected() -> None:
    with pytest.raises(ValueError, match="stage 2 of a pipeline of 2 stages"):
        forward_only(2, 2, [0])
