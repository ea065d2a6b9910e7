"""Reactions that begin later, or that take a checkpoint in their pauses."""

from collections.abc import Callable, Sequence

from ftd.replay.policy import Change, Pause, Reaction, RecoveryPolicy, Running
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace, TraceEvent

RUNNING = Running(iteration_s=10.0, samples=1.0)


class Scripted(RecoveryPolicy):
    """A policy with one answer for each change."""

    name = "scripted"

    def __init__(self, *answers: Callable[[Change], Reaction]) -> None:
        self._answers = list(answers)

    def start(self, nodes: Sequence[str]) -> Reaction:
        return Reaction(running=RUNNING)

    def change(self, change: Change) -> Reaction:
        return self._answers.pop(0)(change)


def trace(*times_s: float, end_s: float) -> Trace:
    events = [TraceEvent(at_s=0.0, kind="add", node="a")]
    events += [TraceEvent(at_s=at_s, kind="add", node=f"n{at_s}") for at_s in times_s]
    return Trace(name="trace", source="test", events=tuple(events), end_s=end_s)


def pause(seconds: float, **fields: object) -> Callable[[Change], Reaction]:
    pauses = (Pause(category="restarting", seconds=seconds),)
    return lambda change: Reaction(pauses=pauses, running=RUNNING, **fields)  # type: ignore[arg-type]


def test_a_reaction_at_the_boundary_lets_the_iteration_in_flight_end() -> None:
    def at_the_boundary(change: Change) -> Reaction:
        assert change.boundary_s == 5.0
        return Reaction(
            pauses=(Pause(category="restarting", seconds=20.0),), running=RUNNING, after_s=change.boundary_s
        )

    found = replay(Scripted(at_the_boundary), trace(15.0, end_s=60.0))
    assert found.seconds["restarting"] == 20.0
    assert found.iterations == 4
    assert found.seconds["redone"] == 0.0


def test_a_change_replaces_a_reaction_that_has_not_begun() -> None:
    found = replay(Scripted(pause(30.0, after_s=10.0), pause(5.0)), trace(20.0, 25.0, end_s=100.0))
    assert found.seconds["restarting"] == 5.0


def test_a_checkpoint_in_the_pauses_counts_from_the_moment_it_is_complete() -> None:
    saving = pause(20.0, saved_s=8.0)
    complete = replay(Scripted(saving, pause(0.0, undo="checkpoint")), trace(30.0, 38.0, end_s=40.0))
    assert complete.iterations == 3
    partial = replay(Scripted(saving, pause(0.0, undo="checkpoint")), trace(30.0, 37.0, end_s=40.0))
    assert partial.iterations == 0
