"""Tests of limits: how long a job waits for something that does not answer or cannot be read, and what it does
then.
"""

from statemachine.agent.events import TrainerReported
from statemachine.effects import (
    CommitCheckpoint,
    FindCheckpoint,
    InstructTrainer,
    RetainSnapshotCopies,
    SetTimer,
)
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    CheckpointCommitted,
    CheckpointFound,
    RestoreChecked,
)
from statemachine.messages import trainer
from statemachine.messages.cluster import RestoreFailed, RetainSnapshot, TakeSnapshot
from statemachine.messages.common import Finished, Resumed
from statemachine.messages.values import CheckpointRecord, ClusterPhase, Restore
from statemachine.timing import Timing
from tests.helpers.agent_machine import Daemon
from tests.helpers.transcripts import LAYERS, report, vote
from tests.helpers.writing import NODES, Writing, all_done, gone

TIMING = Timing()


# --- the end of a job --------------------------------------------------------------------------------


def test_the_finish_limit_grows_with_the_bytes_up_to_the_persist_limit() -> None:
    assert TIMING.finish_limit_s(0) == 120.0
    assert TIMING.finish_limit_s(16 * 2**20 * 30) == 150.0
    assert TIMING.finish_limit_s(2**50) == TIMING.persist_s


def test_a_disk_that_hangs_does_not_keep_a_job_from_ending() -> None:
    s = Writing()
    s.train(steps=8)
    s.written(5)
    all_done(s, 8)
    assert [timer.name for timer in s.all(SetTimer)].count("finish") == 1
    for name in NODES:
        s.complete(name, 8)
    assert len(s.orders()) == 4
    s.fire("finish", after_s=120.1)
    assert "120" in s.events("CheckpointAbandoned")[0].reason
    assert len(s.events("CheckpointAbandoned")) == 1
    assert s.events("JobFinished")


def test_a_snapshot_that_cannot_be_ordered_does_not_keep_a_job_from_ending() -> None:
    s = Writing()
    s.train(steps=8)
    s.written(5)
    s.stepped("node-0", 1, *range(1, 8))
    all_done(s, 8)
    s.fire("finish", after_s=120.1)
    assert "no checkpoint of the last step" in s.events("CheckpointAbandoned")[0].reason
    assert s.events("CheckpointAbandoned")[0].details["last_complete_step"] == 5
    assert s.events("JobFinished")


def test_an_earlier_checkpoint_that_hangs_counts_toward_the_same_limit() -> None:
    s = Writing()
    s.train(steps=8)
    s.snapshot(5)
    assert len(s.orders()) == 4
    all_done(s, 8)
    assert [timer.name for timer in s.all(SetTimer)].count("finish") == 1
    for name in NODES:
        s.complete(name, 8)
    assert not s.orders()
    s.fire("finish", after_s=120.1)
    assert s.events("CheckpointAbandoned")[0].step == 5
    assert s.events("JobFinished")


# --- a commit that hangs -----------------------------------------------------------------------------


def hang(s: Writing, step: int) -> CommitCheckpoint:
    """Let every layer be written and the commit hang."""
    s.snapshot(step)
    for node, order in s.orders().items():
        s.wrote(order, node)
    commit: CommitCheckpoint = s.one(CommitCheckpoint)
    s.fire("persist", after_s=TIMING.checkpoint_location_s)
    assert "the commit did not end in 60 s" in s.events("CheckpointAbandoned")[0].reason
    return commit


def test_a_commit_that_hangs_is_abandoned_and_the_next_snapshot_is_tried() -> None:
    s = Writing()
    s.train()
    commit = hang(s, 5)
    s.snapshot(9)
    assert len(s.orders()) == 4
    s.feed(CheckpointCommitted, attempt=commit.attempt, step=5, pruned=())
    assert s.events("MessageIgnored")


def test_a_checkpoint_of_an_abandoned_commit_is_skipped_once_its_steps_are_undone() -> None:
    s = Writing()
    gone(s, before=lambda: hang(s, 9))
    asked_nodes(s)
    s.fire("pause_limit", after_s=30.0)
    asked = looked(s)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT_5, skipped=(), reason="")
    s.plan()
    assert s.events("RolledBack")[0].step == 5
    generation = s.machine.generation
    s.say("node-1", RestoreFailed(generation=generation, detail="damaged", corrupt=True))
    for name in NODES:
        s.quiesced(name, generation + 1, report())
    s.plan_or_not()
    assert s.one(FindCheckpoint).corrupt_steps == (5, 9)


# --- an unreadable checkpoint location ---------------------------------------------------------------

CHECKPOINT_5 = CheckpointRecord(step=5, vote=vote(5), layers=LAYERS)


def asked_nodes(s: Writing) -> None:
    """Let every node report that it holds nothing."""
    generation = s.machine.generation
    for name in NODES:
        s.quiesced(name, generation, report())
    s.plan_or_not()
    if s.machine.cluster.snapshots.newest is not None:
        s.feed(RestoreChecked, generation=generation, possible=False, reason="nobody has a part")


def looked(s: Writing) -> FindCheckpoint:
    """Return the search of the checkpoint location that follows."""
    asked_nodes(s)
    asked: FindCheckpoint = s.one(FindCheckpoint)
    return asked


def unreadable(s: Writing, asked: FindCheckpoint) -> None:
    s.feed(
        CheckpointFound,
        generation=asked.generation,
        checkpoint=None,
        skipped=(),
        reason="input/output error",
        unreadable=True,
    )


def test_an_unreadable_checkpoint_location_is_tried_again_while_paused() -> None:
    s = Writing()
    gone(s)
    unreadable(s, looked(s))
    assert s.machine.phase is ClusterPhase.PAUSED
    assert "input/output error" in s.machine.public_state()["waiting_for"]
    s.fire("pause_limit", after_s=3.0)
    asked = looked(s)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT_5, skipped=(), reason="")
    s.plan()
    assert s.events("RolledBack")[0].step == 5


def test_an_unreadable_checkpoint_location_fails_the_job_after_lost_state_s() -> None:
    s = Writing()
    gone(s)
    unreadable(s, looked(s))
    for _ in range(9):
        s.fire("pause_limit", after_s=3.0)
        unreadable(s, looked(s))
        assert s.machine.phase is ClusterPhase.PAUSED
    s.fire("pause_limit", after_s=3.0)
    unreadable(s, looked(s))
    reason = s.events("JobFailed")[0].reason
    assert "input/output error; this has lasted for 30 s" in reason


def test_the_time_for_which_a_checkpoint_location_is_unreadable_does_not_include_an_outage_of_the_broker() -> (
    None
):
    """Nobody tries the location during the outage."""
    s = Writing()
    gone(s)
    unreadable(s, looked(s))
    s.feed(BrokerDisconnected)
    s.wait(60.0)
    s.feed(BrokerConnected)
    for _ in range(9):
        s.fire("pause_limit", after_s=3.0)
        unreadable(s, looked(s))
        assert s.machine.phase is ClusterPhase.PAUSED
    s.fire("pause_limit", after_s=3.0)
    unreadable(s, looked(s))
    assert s.machine.phase is ClusterPhase.FAILED


def test_a_checkpoint_location_that_does_not_answer_is_unreadable() -> None:
    s = Writing()
    gone(s)
    asked = looked(s)
    s.fire("find", after_s=TIMING.checkpoint_location_s)
    assert s.machine.phase is ClusterPhase.PAUSED
    assert "no answer in 60 s" in s.machine.public_state()["waiting_for"]
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT_5, skipped=(), reason="")
    assert s.events("MessageIgnored")


def test_a_node_that_cannot_read_the_checkpoint_location_is_asked_again_later() -> None:
    s = Writing()
    gone(s)
    asked = looked(s)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT_5, skipped=(), reason="")
    s.plan()
    s.say("node-1", RestoreFailed(generation=s.machine.generation, detail="stale file handle"))
    generation = s.machine.generation
    for name in NODES:
        s.quiesced(name, generation, report())
    s.plan_or_not()
    assert not s.all(FindCheckpoint)
    assert s.machine.phase is ClusterPhase.PAUSED
    s.fire("pause_limit", after_s=3.0)
    asked = looked(s)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT_5, skipped=(), reason="")
    s.plan()
    s.wait(30.0)
    s.say("node-1", RestoreFailed(generation=s.machine.generation, detail="stale file handle"))
    assert "stale file handle" in s.events("JobFailed")[0].reason


# --- a node --------------------------------------------------------------------------------------


def training(devices: int = 2) -> Daemon:
    s = Daemon(devices=devices)
    s.prepared()
    s.quiesced(1)
    s.order(s.resume(1, 0))
    for device in range(devices):
        moved = {"bytes_moved": 0, "rendezvous_s": 0.0, "state_s": 0.0}
        s.feed(TrainerReported, device=device, report=Resumed(generation=1, **moved))
    for device in range(devices):
        s.feed(
            TrainerReported,
            device=device,
            report=trainer.TrainerStepped(generation=1, step=1, vote=vote(1), step_s=0.1, bubble_s=0.0),
        )
    return s


def snapped(s: Daemon) -> list[tuple[int, bool]]:
    """Return the devices whose trainers were instructed to take a snapshot, and whether it was to be the last one."""
    published = [(effect.device, effect.instruction) for effect in s.all(InstructTrainer)]
    return [(device, snap.last) for device, snap in published if isinstance(snap, trainer.StartSnapshot)]


def test_only_one_trainer_asks_for_a_snapshot() -> None:
    """Otherwise the second trainer could ask after the VOTE in which the first one asked: two snapshots for
    one order.
    """
    s = training(devices=2)
    s.order(TakeSnapshot(generation=1, after_step=1))
    assert snapped(s) == [(0, False)]
    s.order(TakeSnapshot(generation=1, after_step=1))
    assert not snapped(s), "obeyed once"
    s.order(TakeSnapshot(generation=0, after_step=9))
    assert not snapped(s), "of another generation"


def test_all_trainers_take_a_snapshot_after_the_last_step() -> None:
    s = training(devices=2)
    for device in range(2):
        s.feed(TrainerReported, device=device, report=Finished(generation=1, step=10, digests={}))
    s.order(TakeSnapshot(generation=1, after_step=10))
    assert snapped(s) == [(0, True), (1, True)]


def test_a_snapshot_retained_from_another_lineage_does_not_count() -> None:
    """It retained step 8 while the others returned to a checkpoint of step 4; as long as it names 8, no
    snapshot is ordered.
    """
    s = training()
    s.order(RetainSnapshot(job_id="job-1", step=8))
    assert s.all(RetainSnapshotCopies)
    s.quiesced(3)
    s.order(s.resume(3, 4, lineage=2))
    s.order(RetainSnapshot(job_id="job-1", step=9))
    assert s.all(RetainSnapshotCopies) == [], "of the past that was undone"
    s.order(RetainSnapshot(job_id="job-1", step=6, lineage=2))
    assert [kept.order.step for kept in s.all(RetainSnapshotCopies)] == [6]
    s.order(RetainSnapshot(job_id="job-1", step=5, lineage=2))
    assert s.all(RetainSnapshotCopies) == [], "an older one"


def test_the_snapshot_that_is_restored_stays_retained() -> None:
    s = training()
    s.order(RetainSnapshot(job_id="job-1", step=8))
    s.quiesced(3)
    restore = Restore(job_id="job-1", step=8, generation=1, groups=(), sources={})
    s.order(s.resume(3, 8, lineage=3, restore=restore))
    s.order(RetainSnapshot(job_id="job-1", step=7, lineage=0))
    assert not s.all(RetainSnapshotCopies)
