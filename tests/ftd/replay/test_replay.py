"""The kernel of the replay: when work counts, what a reaction takes back, and where each second goes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.replay.outcome import Outcome
from ftd.replay.policy import (
    CATEGORIES,
    Category,
    Change,
    Checkpoints,
    Pause,
    Reaction,
    RecoveryPolicy,
    Running,
)
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace, TraceEvent

RUNNING = Running(iteration_s=2.0, samples=8.0)
RUNS = Reaction(running=RUNNING)


class ScriptedPolicy(RecoveryPolicy):
    """A policy that answers as a test says, and records what it was asked."""

    name = "scripted"

    def __init__(self, first: Reaction, answer: Callable[[Change], Reaction | None]) -> None:
        self._first, self._answer = first, answer
        self.changes: list[Change] = []

    def start(self, nodes: Sequence[str]) -> Reaction:
        return self._first

    def change(self, change: Change) -> Reaction | None:
        self.changes.append(change)
        return self._answer(change)


def trace_of(*losses_s: float, end_s: float, notice_s: float = 0.0) -> Trace:
    """Return a trace that begins with a node more than it loses, one at each of ``losses_s``."""
    nodes = [f"n{index}" for index in range(len(losses_s) + 1)]
    events = [TraceEvent(at_s=0.0, kind="add", node=node) for node in nodes]
    events += [
        TraceEvent(at_s=at_s, kind="remove", node=node, notice_s=notice_s)
        for at_s, node in zip(losses_s, nodes, strict=False)
    ]
    return Trace(name="test", source="test", events=tuple(events), end_s=end_s)


def run(trace: Trace, *answers: Reaction | None, first: Reaction = RUNS) -> tuple[Outcome, ScriptedPolicy]:
    """Replay a policy that gives these answers, one for each change."""
    left = list(answers)
    policy = ScriptedPolicy(first, lambda _: left.pop(0))
    outcome = replay(policy, trace)
    assert left == []
    return outcome, policy


def spent(outcome: Outcome) -> dict[Category, Any]:
    """Return the categories that have any time."""
    return {name: pytest.approx(seconds) for name, seconds in outcome.seconds.items() if seconds > 1e-9}


def test_only_whole_iterations_count() -> None:
    outcome, _ = run(trace_of(end_s=9.0))
    assert outcome.iterations == 4
    assert outcome.samples == 32
    assert spent(outcome) == {"computing": 9.0}
    assert outcome.node_s == 9.0


def test_an_undone_iteration_is_computed_again() -> None:
    pauses = (Pause(category="detecting", seconds=1.0), Pause(category="moving", seconds=0.5))
    outcome, policy = run(
        trace_of(5.5, end_s=11.0), Reaction(pauses=pauses, running=RUNNING, undo="iteration")
    )
    assert outcome.iterations == 2 + 2
    assert spent(outcome) == {"computing": 8.0, "redone": 1.5, "detecting": 1.0, "moving": 0.5}
    [recovery] = outcome.recoveries
    assert (recovery.kind, recovery.at_s, recovery.duration_s, recovery.redone_s) == ("loss", 5.5, 1.5, 1.5)
    [change] = policy.changes
    assert (change.running, change.iterations, change.removed) == (True, 2, ("n0",))
    assert change.boundary_s == pytest.approx(0.5)


def test_an_undone_iteration_may_keep_a_share() -> None:
    """At 5.5 s three quarters of the third iteration are done, of which half an iteration is kept."""
    slower = Running(iteration_s=4.0, samples=8.0)
    reaction = Reaction(running=slower, undo="iteration", kept_share=0.5)
    outcome, _ = run(trace_of(5.5, end_s=7.5), reaction)
    assert outcome.iterations == 3
    assert spent(outcome) == {"computing": 7.0, "redone": 0.5}
    most, _ = run(trace_of(5.5, end_s=6.5), dataclasses.replace(reaction, kept_share=1.0))
    assert most.iterations == 3 and most.seconds["redone"] == 0.0


def test_without_undo_the_iteration_in_flight_goes_on_at_the_new_pace() -> None:
    slower = Running(iteration_s=4.0, samples=8.0, efficiency=0.5)
    pauses = (Pause(category="planning", seconds=1.0),)
    outcome, _ = run(trace_of(3.0, end_s=10.0), Reaction(pauses=pauses, running=slower))
    # Half of the second iteration is left at 4 s, which takes until 6 s; the third one ends at 10 s.
    assert outcome.iterations == 3
    assert spent(outcome) == {"computing": 3.0 + 3.0, "planning": 1.0, "reduced": 3.0}
    assert outcome.throughput([0.0, 2.0, 6.0, 10.0]) == [4.0, 2.0, 2.0]


def test_an_iteration_of_two_paces_takes_back_what_it_took() -> None:
    slower = Running(iteration_s=20.0, samples=8.0, efficiency=0.1)
    outcome, _ = run(
        trace_of(1.0, 1.5, end_s=3.5),
        Reaction(running=slower),
        Reaction(running=RUNNING, undo="iteration"),
    )
    assert spent(outcome) == {"computing": 2.0, "redone": 1.5}


def test_a_rollback_returns_to_the_newest_checkpoint_that_is_written() -> None:
    # Checkpoints hold 2 and 4 iterations; their stalls end at 5 and 10 s, and they can be used at 8 and 13 s.
    running = Running(
        iteration_s=2.0, samples=8.0, checkpoints=Checkpoints(every_iterations=2, stall_s=1.0, write_s=3.0)
    )
    first = Reaction(running=running)
    after_s: list[tuple[float, int, float]] = [
        (6.0, 0, 5.0),  # The first one is not written yet.
        (11.0, 2, 5.0),  # The second one is not.
        (13.5, 4, 3.5),
    ]
    for at_s, kept, redone_s in after_s:
        outcome, _ = run(
            trace_of(at_s, end_s=at_s + 1.0), Reaction(running=None, undo="checkpoint"), first=first
        )
        assert outcome.iterations == kept
        assert outcome.seconds["redone"] == pytest.approx(redone_s)
        assert outcome.seconds["computing"] == pytest.approx(2.0 * kept)
        assert outcome.seconds["waiting"] == pytest.approx(1.0)


@pytest.mark.parametrize("at_s", [1.0, 7.5, 12.5, 13.5, 40.0, 1000.0, 1001.5])
def test_checkpoints_without_stalls_are_found_as_those_of_a_moment(at_s: float) -> None:
    """All checkpoints up to the rollback are recorded at once, or one by one with a stall that does not matter."""
    kept = []
    for stall_s in (0.0, 1e-9):
        checkpoints = Checkpoints(every_iterations=3, stall_s=stall_s, write_s=7.0)
        running = Running(iteration_s=2.0, samples=8.0, checkpoints=checkpoints)
        trace = trace_of(0.5, at_s, end_s=at_s + 1.0)
        outcome, _ = run(
            trace, None, Reaction(running=None, undo="checkpoint"), first=Reaction(running=running)
        )
        kept.append(outcome.iterations)
    assert kept == [3 * max(0, int((at_s - 7.0) // 6.0))] * 2


def test_a_checkpoint_that_a_rollback_interrupts_is_lost() -> None:
    running = Running(iteration_s=2.0, samples=8.0, checkpoints=Checkpoints(every_iterations=2, stall_s=2.0))
    back = Reaction(pauses=(Pause(category="restarting", seconds=1.0),), running=running, undo="checkpoint")
    outcome, _ = run(trace_of(5.0, 9.5, end_s=10.0), back, None, first=Reaction(running=running))
    # The stall from 4 to 6 s is cut; after the restart two iterations run until 10 s.
    assert spent(outcome) == {"computing": 4.0, "redone": 4.0, "stalled": 1.0, "restarting": 1.0}
    assert [each.kind for each in outcome.recoveries] == ["rollback"]


def test_a_policy_can_return_to_a_state_of_its_own() -> None:
    outcome, _ = run(trace_of(9.0, end_s=9.5), Reaction(running=None, keep_iterations=1))
    assert outcome.iterations == 1
    assert spent(outcome) == {"computing": 2.0, "redone": 7.0, "waiting": 0.5}


def test_a_reaction_at_the_boundary_loses_nothing() -> None:
    pauses = (Pause(category="moving", seconds=1.0),)
    policy = ScriptedPolicy(
        Reaction(running=RUNNING),
        lambda change: Reaction(pauses=pauses, running=RUNNING, undo="iteration", after_s=change.boundary_s),
    )
    outcome = replay(policy, trace_of(3.0, end_s=9.0))
    assert outcome.iterations == 4
    assert spent(outcome) == {"computing": 8.0, "moving": 1.0}
    assert outcome.recoveries[0].at_s == pytest.approx(4.0)


def test_a_failure_replaces_a_reaction_that_waits_for_the_boundary() -> None:
    never = Reaction(pauses=(Pause(category="moving", seconds=100.0),), running=RUNNING, after_s=1.0)
    now = Reaction(pauses=(Pause(category="detecting", seconds=1.0),), running=RUNNING, undo="iteration")
    outcome, _ = run(trace_of(3.0, 3.5, end_s=6.5), never, now)
    assert spent(outcome) == {"computing": 4.0, "redone": 1.5, "detecting": 1.0}


def test_a_change_during_a_pause_belongs_to_the_same_recovery() -> None:
    first = Reaction(pauses=(Pause(category="detecting", seconds=4.0),), running=RUNNING, undo="iteration")
    second = Reaction(pauses=(Pause(category="moving", seconds=1.0),), running=RUNNING)
    outcome, policy = run(trace_of(3.0, 5.0, end_s=8.0), first, second)
    assert [change.running for change in policy.changes] == [True, False]
    assert spent(outcome) == {"computing": 4.0, "redone": 1.0, "detecting": 2.0, "moving": 1.0}
    [recovery] = outcome.recoveries
    assert (recovery.lost, recovery.duration_s) == (2, 3.0)


def test_a_change_without_a_reaction_leaves_pauses_alone() -> None:
    first = Reaction(pauses=(Pause(category="detecting", seconds=4.0),), running=RUNNING, undo="iteration")
    outcome, _ = run(trace_of(3.0, 5.0, end_s=9.0), first, None)
    assert spent(outcome) == {"computing": 4.0, "redone": 1.0, "detecting": 4.0}


def test_waiting_ends_with_the_next_reaction_and_is_not_part_of_the_recovery() -> None:
    lost = Reaction(pauses=(Pause(category="detecting", seconds=1.0),), running=None, undo="iteration")
    back = Reaction(pauses=(Pause(category="restarting", seconds=1.0),), running=RUNNING)
    outcome, _ = run(trace_of(4.0, 10.0, end_s=13.0), lost, back)
    assert spent(outcome) == {"computing": 6.0, "detecting": 1.0, "waiting": 5.0, "restarting": 1.0}
    assert [each.duration_s for each in outcome.recoveries] == [2.0]


def test_a_removal_is_announced_but_not_before_the_node_comes() -> None:
    events = [
        TraceEvent(at_s=0.0, kind="add", node="a"),
        TraceEvent(at_s=0.0, kind="add", node="b"),
        TraceEvent(at_s=5.0, kind="add", node="c"),
        TraceEvent(at_s=8.0, kind="remove", node="a", notice_s=2.0),
        TraceEvent(at_s=9.0, kind="remove", node="c", notice_s=60.0),
    ]
    trace = Trace(name="test", source="test", events=tuple(events), end_s=12.0)
    _, policy = run(trace, *[None] * 5)
    asked = [(each.at_s, each.removed, each.added, each.leaving, each.notice_s) for each in policy.changes]
    assert asked == [
        (5.0, (), ("c",), (), 0.0),
        (5.0, (), (), ("c",), 4.0),
        (6.0, (), (), ("a",), 2.0),
        (8.0, ("a",), (), (), 0.0),
        (9.0, ("c",), (), (), 0.0),
    ]
    assert all(set(each.leaving) <= set(each.nodes) for each in policy.changes)
    assert [each.until_s for each in policy.changes] == [5.0, 6.0, 8.0, 9.0, 12.0]


def test_a_policy_is_asked_when_it_wants_to_wake() -> None:
    class WakingPolicy(ScriptedPolicy):
        def change(self, change: Change) -> Reaction | None:
            self.wake_at_s = change.at_s + 2.0 if len(self.changes) < 2 else None
            return super().change(change)

    policy = WakingPolicy(Reaction(running=RUNNING), lambda _: None)
    outcome = replay(policy, trace_of(3.0, 6.0, end_s=10.0))
    assert [each.at_s for each in policy.changes] == [3.0, 5.0, 6.0]
    assert spent(outcome) == {"computing": 10.0}


reactions = st.builds(
    Reaction,
    pauses=st.lists(
        st.builds(Pause, category=st.sampled_from(CATEGORIES[3:7]), seconds=st.floats(0, 30)), max_size=3
    ).map(tuple),
    running=st.none()
    | st.builds(
        Running,
        iteration_s=st.floats(0.1, 20),
        samples=st.just(8.0),
        efficiency=st.floats(0, 1),
        checkpoints=st.none()
        | st.builds(
            Checkpoints,
            every_iterations=st.integers(1, 5),
            stall_s=st.floats(0, 5),
            write_s=st.floats(0, 20),
        ),
    ),
    undo=st.sampled_from(("nothing", "iteration", "checkpoint")),
    keep_iterations=st.none() | st.integers(0, 20),
    after_s=st.just(0.0) | st.floats(0, 20),
)


@settings(max_examples=150, deadline=None)
@given(
    losses_s=st.lists(st.floats(0.1, 300), min_size=1, max_size=12).map(sorted),
    answers=st.lists(st.none() | reactions, min_size=13, max_size=13),
    begins_at_s=st.sampled_from((0.0, 3e8)),
)
def test_every_second_has_one_category(
    losses_s: list[float], answers: list[Reaction | None], begins_at_s: float
) -> None:
    """At 3e8 s, nearly ten years, times are exact to 6e-8 s only."""
    left = iter(answers[1:])
    first = Reaction(running=None) if begins_at_s else answers[0] or Reaction(running=RUNNING)
    policy = ScriptedPolicy(first, lambda _: next(left, None))
    times_s = [begins_at_s + at_s for at_s in losses_s]
    trace = trace_of(*times_s, end_s=begins_at_s + 400.0)
    outcome = replay(policy, trace)
    assert outcome.wall_s == trace.end_s
    assert sum(outcome.seconds.values()) == pytest.approx(trace.end_s, rel=1e-12, abs=1e-6)
    assert min(outcome.seconds.values()) > -1e-3
    assert outcome.samples == outcome.iterations * 8.0
    begins = [span.begin_s for span in outcome.spans]
    ends = [span.end_s for span in outcome.spans]
    assert all(begin < end for begin, end in zip(begins, ends, strict=True))
    assert all(end <= begin + 1e-5 for end, begin in zip(ends, begins[1:], strict=False))
    edges_s = [trace.end_s * part / 7 for part in range(8)]
    total = sum(rate * trace.end_s / 7 for rate in outcome.throughput(edges_s))
    assert total == pytest.approx(outcome.samples, rel=1e-6, abs=1e-4)
