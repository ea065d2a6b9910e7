"""Tests of spikes of the loss: what counts as one, the rollback, and the batches that are left out."""

from typing import Any

from statemachine.cluster.loss_spikes import LossSpikes, Spike, threshold_of
from statemachine.cluster.spikes import MAX_TRIES
from statemachine.effects import CheckRestore, EmitEvent
from statemachine.events import BrokerConnected, NodeVanished, RestoreChecked, TemplatesReady
from statemachine.messages.cluster import Quiesced, Resume, RetainSnapshot, Stepped
from statemachine.messages.common import Prepared, Quiesce
from statemachine.messages.values import ClusterPhase, CommittedStep, UpdatePolicy, Vote, batch_of
from tests.helpers.cluster_machine import restarted
from tests.helpers.snapshot_machine import HELD, Snapshots
from tests.helpers.transcripts import report

SKIPPING = UpdatePolicy(on_spike="skip", spike_window=3)


def say_loss(s: Snapshots, step: int, loss: float) -> None:
    generation, lineage = s.machine.generation, s.machine.cluster.lineage
    steps = (CommittedStep(step=step, vote=Vote(loss=loss, gradient_norm=1.0)),)
    s.say("node-0", Stepped(generation=generation, steps=steps, step_s=0.1, lineage=lineage))


def before_spike(**policy: Any) -> Snapshots:
    """Return a machine whose nodes have trained five steps and hold a snapshot of step 3."""
    s = Snapshots()
    s.complete_snapshot(updates=UpdatePolicy(**{"on_spike": "skip", "spike_window": 3} | policy))
    return s


def answer_quiesce(s: Snapshots, step: int, *names: str) -> None:
    for name in names or tuple(HELD):
        state = report(step, held=HELD.get(name, ()), lineage=s.machine.cluster.lineage)
        s.say(name, Quiesced(generation=s.machine.generation, reports=(state,)))


def roll_back(s: Snapshots, step: int, *names: str) -> None:
    """Let the nodes answer the Quiesce at ``step``, and return to the snapshot."""
    answer_quiesce(s, step, *names)
    s.plan_or_not()
    s.check()
    s.plan()


def resume(s: Snapshots) -> None:
    for name in HELD:
        s.resumed(name, s.machine.generation)


def taken_over(s: Snapshots) -> Snapshots:
    other = restarted(s)
    other.feed(BrokerConnected)
    other.feed(TemplatesReady, job_id="job-1")
    return other


def skipped(s: Snapshots) -> tuple[int, ...]:
    return s.machine._c.spikes.skipped_batches


def test_a_spike_is_undone_and_its_batch_left_out() -> None:
    s = before_spike()
    s.note("the loss of step 6 is far above those of the last three steps")
    say_loss(s, 6, 9.0)
    s.wait(0.01)
    answer_quiesce(s, 6)
    s.note("what the nodes hold does not count: the snapshot of step 3 does")
    s.plan_or_not()
    s.check()
    s.plan()
    resume(s)
    s.compare("a_spike_of_the_loss")
    assert skipped(s) == (6,)


def test_every_later_resume_names_the_batches_also_after_a_takeover_and_on_fewer_nodes() -> None:
    s = before_spike()
    say_loss(s, 6, 9.0)
    s = taken_over(s)
    roll_back(s, 6)
    assert {command.command.skipped_batches for command in s.commands(Resume)} == {(6,)}
    resume(s)
    for step, loss in ((4, 0.25), (5, 0.2), (6, 0.17), (7, 0.16)):
        say_loss(s, step, loss)
    s = taken_over(s)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    answer_quiesce(s, 7, "node-0", "node-1", "node-2")
    s.plan()
    assert {command.command.skipped_batches for command in s.commands(Resume)} == {(6,)}
    assert s.machine.cluster.progress.known_step == 7


def test_a_node_that_is_lost_meanwhile_changes_neither_the_rollback_nor_the_batches() -> None:
    s = before_spike()
    say_loss(s, 6, 9.0)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    roll_back(s, 6, "node-0", "node-1", "node-2")
    assert skipped(s) == (6,) and s.machine.cluster.progress.known_step == 3
    [event] = s.events("RolledBack")
    assert event.reason.startswith("the loss of step 6 is a spike: 9 is above")


def test_no_snapshot_of_a_spike_or_of_a_step_that_was_not_judged_replaces_the_newest() -> None:
    s = Snapshots()
    s.begin(updates=SKIPPING)
    s.ordered()
    s.completed(*HELD, step=5)
    assert not s.commands(RetainSnapshot) and s.machine.cluster.snapshots.newest is None, (
        "steps 3 and 4 are not known"
    )
    s.stepped("node-0", 1, 3, 4, 5)
    assert len(s.commands(RetainSnapshot)) == 4
    assert s.machine.cluster.snapshots.newest is not None and s.machine.cluster.snapshots.newest.step == 5


def test_without_a_snapshot_or_by_default_the_loss_is_accepted() -> None:
    s = Snapshots()
    s.begin(updates=SKIPPING)
    s.stepped("node-0", 1, 2, 3)
    say_loss(s, 4, 9.0)
    [event] = s.events("LossSpiked")
    assert event.reason.endswith("there is no snapshot of an earlier step, so it is accepted")
    assert not event.details["skipped"] and s.machine.phase is ClusterPhase.RUNNING
    s = before_spike(on_spike="continue")
    say_loss(s, 6, 9.0)
    assert not s.events("LossSpiked") and s.machine.phase is ClusterPhase.RUNNING


def test_a_loss_that_stays_high_is_accepted_after_a_few_batches() -> None:
    s = before_spike()
    for number in range(MAX_TRIES):
        say_loss(s, 6, 9.0 + number)
        roll_back(s, 6)
        resume(s)
        for step, loss in ((4, 0.25), (5, 0.2)):
            say_loss(s, step, loss)
    assert skipped(s) == (6, 7, 8)
    say_loss(s, 6, 9.0)
    [event] = s.events("LossSpiked")
    assert event.reason.endswith("it was so with 4 different batches, so it is accepted")
    assert s.machine.phase is ClusterPhase.RUNNING
    say_loss(s, 7, 30.0)
    assert not s.events("LossSpiked"), "nothing is judged until the window is full again"


def test_a_snapshot_that_cannot_be_restored_does_not_fail_the_job() -> None:
    s = before_spike()
    say_loss(s, 6, 9.0)
    answer_quiesce(s, 6)
    s.plan_or_not()
    asked = s.one(CheckRestore)
    s.feed(RestoreChecked, generation=asked.generation, possible=False, reason="no part of node-1", tier="")
    assert any("cannot be restored: no part of node-1, so it" in e.reason for e in s.all(EmitEvent))
    assert {one.command.mode for one in s.commands(Quiesce)} == {"abort"}, "all of them stand still"
    answer_quiesce(s, 6)
    s.plan()
    resume(s)
    assert (
        s.machine.phase is ClusterPhase.RUNNING
        and s.machine.cluster.progress.known_step == 6
        and not skipped(s)
    )


def test_a_spike_in_the_first_step_after_a_join_belongs_to_the_recovery_of_the_join() -> None:
    s = before_spike()
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    answer_quiesce(s, 5)
    s.quiesced("node-4", 2, report())
    s.plan()
    say_loss(s, 6, 9.0)
    assert s.machine.phase is ClusterPhase.QUIESCING
    roll_back(s, 6, *HELD, "node-4")
    resume(s)
    s.resumed("node-4", 3)
    say_loss(s, 4, 0.25)
    [completed] = s.events("RecoveryCompleted")
    recovery = completed.details["recovery"]
    assert (recovery["cause"], recovery["nodes"], recovery["generations_tried"]) == (
        "node_joined",
        ["node-4"],
        2,
    )
    assert recovery["rolled_back_steps"] == 3


def test_what_counts_as_a_spike() -> None:
    assert threshold_of([2.0, 2.0, 2.0], 8.0) == 2.0 + 8 * 0.02
    assert threshold_of([1.0, 2.0, 3.0, 4.0, 100.0], 2.0) == 3.0 + 2 * 1.4826


def test_step_t_uses_the_t_th_batch_that_is_not_left_out() -> None:
    assert [batch_of(step, (3, 4, 7)) for step in range(1, 7)] == [1, 2, 5, 6, 8, 9]
    assert batch_of(6, ()) == 6


def test_a_rollback_to_a_later_step_than_the_spike_leaves_nothing_out() -> None:
    losses = tuple((step, 1.0) for step in range(1, 6))
    spike = Spike(step=6, loss=9.0, batch=6, threshold=2.0)
    back = LossSpikes(losses=losses, pending=spike).rolled_back(3)
    assert (back.losses, back.skipped_batches, back.pending) == (losses[:3], (6,), None)
    assert LossSpikes(losses=losses, pending=spike).rolled_back(6).skipped_batches == ()
