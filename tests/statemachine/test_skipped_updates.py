"""Tests of steps that update nothing: which ones count, and when they end a job."""

import math

import pytest

from statemachine.cluster.skipped_updates import MAX_RUNS, SkippedUpdates, find_failure, is_counted
from statemachine.effects import EmitEvent
from statemachine.events import BrokerConnected, NodeVanished, TemplatesReady
from statemachine.messages.cluster import Stepped
from statemachine.messages.values import ClusterPhase, CommittedStep, NotFinite, UpdatePolicy, Vote
from tests.helpers.cluster_machine import events, restarted, running
from tests.helpers.transcripts import Coordination, report, vote

PLACE = NotFinite(layer=2, name="blocks.1 (Block)", value="output", nodes=("node-1",))
OVERFLOW = NotFinite(layer=2, name="blocks.1 (Block)", value="gradient", nodes=("node-1",))
NOTHING = Vote(loss=3.0, gradient_norm=math.nan, skipped=True)


def steps(s: Coordination, *votes: Vote, node: str = "node-0") -> None:
    """Let a node report that these steps follow the last known one."""
    first = s.machine.cluster.progress.known_step + 1
    known = tuple(CommittedStep(step=first + n, vote=one) for n, one in enumerate(votes))
    s.say(node, Stepped(generation=s.machine.generation, steps=known, step_s=0.1))


def outcome(s: Coordination) -> str:
    return str(s.machine.public_state()["outcome"])


def nothing_at(place: NotFinite | None) -> Vote:
    return Vote(loss=3.0, gradient_norm=math.nan, skipped=True, not_finite=place)


def test_steps_that_update_nothing_are_reported_now_and_then() -> None:
    s = running(steps=200)
    steps(s, NOTHING, NOTHING, vote(4), *[NOTHING] * 11)
    published = [e for e in s.all(EmitEvent) if e.name == "UpdateSkipped"]
    assert [(e.step, e.details["steps"]) for e in published] == [(2, 1), (5, 1), (14, 10)]
    assert published[0].reason == "step 2 updated no parameter because the gradients are not finite"
    assert published[2].reason.endswith(", 10 steps in a row")


def test_a_job_fails_after_too_many_in_a_row_and_names_the_first_place() -> None:
    s = running(steps=100)
    steps(s, *[NOTHING] * 19, vote(21), nothing_at(PLACE), *[NOTHING] * 18)
    assert s.machine.phase is ClusterPhase.RUNNING
    steps(s, NOTHING)
    assert s.machine.phase is ClusterPhase.FAILED
    assert events(s)[-1] == "JobFailed"
    assert all(node.quarantine is None for node in s.machine._c.nodes.values()), "no node is blamed"
    assert outcome(s) == (
        "the updates of 20 steps in a row were skipped, from step 22 on; in step 22 the first value that was not "
        "finite was the output of blocks.1 (Block) on node-1; training.max_skipped sets the limit"
    )


def test_the_count_survives_a_failure_a_takeover_and_the_loss_of_the_node_that_reported() -> None:
    s = running(steps=100)
    steps(s, nothing_at(PLACE), *[NOTHING] * 9)
    s = restarted(s)
    s.feed(BrokerConnected)
    s.feed(TemplatesReady, job_id="job-1")
    s.feed(NodeVanished, node="node-0", incarnation=100)
    for name in ("node-1", "node-2", "node-3"):
        s.quiesced(name, 2, report(11))
    s.plan()
    for name in ("node-1", "node-2", "node-3"):
        s.resumed(name, 2)
    steps(s, *[NOTHING] * 9, node="node-1")
    assert s.machine.phase is ClusterPhase.RUNNING
    s = restarted(s)
    s.feed(BrokerConnected)
    steps(s, NOTHING, node="node-1")
    assert outcome(s).startswith(
        "the updates of 20 steps in a row were skipped, from step 2 on; in step 2 the"
    )


def test_a_job_most_of_whose_updates_were_skipped_does_not_finish() -> None:
    """As soon as it is certain, it fails, although never many in a row were skipped."""
    s = running(steps=9)
    steps(s, NOTHING, NOTHING, vote(4), NOTHING, vote(6), NOTHING, vote(8))
    assert s.machine.phase is ClusterPhase.RUNNING
    steps(s, NOTHING)
    assert outcome(s).startswith("5 of the job's 9 updates were skipped, the last ones from step 9 on")
    assert s.machine.phase is ClusterPhase.FAILED


def test_the_limit_can_be_changed_or_removed() -> None:
    s = running(steps=100, updates=UpdatePolicy(max_skipped=2))
    steps(s, NOTHING, NOTHING)
    assert s.machine.phase is ClusterPhase.FAILED
    s = running(steps=100, updates=UpdatePolicy(max_skipped=1))
    steps(s, NOTHING)
    assert outcome(s).startswith("the update of step 2 was skipped; training.max_skipped")
    s = running(steps=100, updates=UpdatePolicy(max_skipped=0))
    steps(s, *[NOTHING] * 98)
    assert s.machine.phase is ClusterPhase.RUNNING


@pytest.mark.parametrize(
    ("one", "counted"),
    [
        (vote(1), False),
        (Vote(loss=2.0, gradient_norm=math.inf, skipped=True), True),
        (Vote(loss=2.0, gradient_norm=math.inf, skipped=True, loss_scale=1024.0), False),
        (Vote(loss=2.0, gradient_norm=math.inf, skipped=True, loss_scale=8.0, not_finite=OVERFLOW), False),
        (Vote(loss=math.nan, gradient_norm=math.inf, skipped=True, loss_scale=8.0, not_finite=PLACE), True),
        (Vote(loss=2.0, gradient_norm=math.inf, skipped=True, loss_scale=1.0, not_finite=OVERFLOW), True),
        (Vote(loss=0.0, gradient_norm=0.0, skipped=True, weight=0.0, loss_scale=1024.0), True),
    ],
)
def test_a_step_that_only_lowers_the_loss_scale_does_not_count(one: Vote, counted: bool) -> None:
    assert is_counted(one) is counted
    s = running(steps=100, updates=UpdatePolicy(max_skipped=1))
    steps(s, one)
    assert (s.machine.phase is ClusterPhase.FAILED) is counted
    assert ("UpdateSkipped" in events(s)) is counted


def test_a_rollback_forgets_the_steps_that_it_undoes() -> None:
    skipped = SkippedUpdates()
    for step in (3, 4, 5, 9, 10):
        skipped = skipped.added(step, PLACE)
    assert (skipped.total, skipped.in_row(10), skipped.in_row(11)) == (5, 2, 0)
    back = skipped.rolled_back(9)
    assert (back.total, back.in_row(9), back.first) == (4, 1, PLACE)
    back = skipped.rolled_back(4)
    assert (back.total, back.in_row(4), back.first) == (2, 2, None)
    assert skipped.rolled_back(2) == SkippedUpdates()


def test_the_journal_does_not_grow_with_the_number_of_skipped_updates() -> None:
    skipped = SkippedUpdates()
    for step in range(1, 2001, 2):
        skipped = skipped.added(step, None)
    assert (skipped.total, len(skipped.runs)) == (1000, MAX_RUNS)
    for limit in (20, 10**6):  # It limits those in a row.
        why = find_failure(skipped, step=1999, steps=1999, max_skipped=limit)
        assert why is not None and why.endswith(
            "; more than half of them are too many, unless training.max_skipped is 0"
        )
    assert find_failure(skipped, step=1999, steps=1999, max_skipped=0) is None
    assert find_failure(skipped, step=1999, steps=2000, max_skipped=20) is None
    assert skipped.rolled_back(10).total == 10
