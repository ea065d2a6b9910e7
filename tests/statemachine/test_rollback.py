"""Tests of rollbacks when live replicas are not enough: which absent nodes are waited for and for how long, and
the way back to a persistent checkpoint.
"""

import pytest
from msgspec.structs import replace

from planner.values import Device, StatePart
from statemachine.effects import ComputePlan, EmitEvent, FindCheckpoint
from statemachine.events import (
    CheckpointFound,
    NodeVanished,
    PlanImpossible,
    RestoreChecked,
    TimerFired,
)
from statemachine.messages.cluster import Heartbeat, RestoreFailed, Resume, Stepped, TakeSnapshot, TrainerLost
from statemachine.messages.common import Prepared, Quiesce
from statemachine.messages.values import CheckpointRecord, ClusterPhase
from statemachine.timing import Timing
from tests.helpers.cluster_machine import running
from tests.helpers.snapshot_machine import HELD, KEY, Snapshots
from tests.helpers.transcripts import LAYERS, Coordination, committed, report, vote
from tests.helpers.writing import NODES, Writing, gone

LOST = {"too_few": False, "reason": "layers 2 and 3 are lost", "lost_layers": (2, 3)}
UNREADABLE = {"checkpoint": None, "skipped": (), "reason": "stale file handle", "unreadable": True}


def waiting_for(s: Coordination) -> str:
    words: str = s.machine.public_state()["waiting_for"]
    return words


def checkpoint(step: int) -> CheckpointRecord:
    return CheckpointRecord(step=step, vote=vote(step), layers=LAYERS)


# --- waiting for absent nodes --------------------------------------------------------------------


def newcomer_joins(s: Coordination, name: str, incarnation: int, at: float) -> None:
    """Let a node without state join a paused job at this time, and find the same layers missing again."""
    s.wait(at - s.now - 0.125)
    s.hello(name, incarnation)
    s.say(name, Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.125)
    generation = s.machine.generation
    s.quiesced("node-0", generation, report(1, held=(0, 1)))
    for other in s.incarnations.keys() - {"node-0", "node-1", "node-2"}:
        s.quiesced(other, generation, report())
    s.feed(PlanImpossible, generation=generation, **LOST)


@pytest.mark.parametrize(("after_s", "left"), [(29.5, "for 0.5 s"), (30.0, None)])
def test_absent_state_is_waited_for_until_its_time_is_over_and_no_longer(
    after_s: float, left: str | None
) -> None:
    s = running(3)
    s.now = 1.0
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.feed(PlanImpossible, generation=2, **LOST)
    newcomer_joins(s, "node-8", 108, 1.0 + after_s)
    if left is None:
        assert s.machine.phase is ClusterPhase.FAILED
    else:
        assert s.machine.phase is ClusterPhase.PAUSED and left in waiting_for(s)


def test_a_node_that_is_back_is_not_waited_for() -> None:
    s = running(4)
    for name, incarnation in (("node-1", 101), ("node-3", 103)):
        s.feed(NodeVanished, node=name, incarnation=incarnation)
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(1, held=(0, 1)))
    s.feed(PlanImpossible, generation=2, **LOST)
    assert "; node-3 may still hold it" in waiting_for(s)
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1, training=True)
    s.fire("join", 0.1)
    for name in HELD:
        s.quiesced(name, 3, report(1, held=(0, 1)))
    s.feed(PlanImpossible, generation=3, **LOST)
    assert s.machine.phase is ClusterPhase.FAILED, "all of them have reported"


# --- back to a checkpoint -------------------------------------------------------------------------


def searching(s: Writing, *, unheard: bool = True) -> FindCheckpoint:
    """Let all nodes report that they hold nothing of the newest step, and no snapshot be possible either.

    :param unheard: they have yet to report.
    """
    for name in NODES if unheard else ():
        if s.machine.public_state()["nodes"][name]["state"] != "OFFLINE":
            s.quiesced(name, s.machine.generation, report())
    s.plan_or_not()
    if s.machine.cluster.snapshots.newest is not None:
        s.feed(RestoreChecked, generation=s.machine.generation, possible=False, reason="nobody has a part")
    asked: FindCheckpoint = s.one(FindCheckpoint)
    return asked


def found(s: Writing, asked: FindCheckpoint, step: int) -> None:
    """Let the checkpoint of this step be found, and plan from it."""
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=checkpoint(step), skipped=(), reason="")
    s.plan()


def commits(s: Writing, *steps: int) -> None:
    """Let the current group commit these steps."""
    listed = tuple(committed(step) for step in steps)
    stepped = Stepped(
        generation=s.machine.generation, steps=listed, step_s=0.1, lineage=s.machine.cluster.lineage
    )
    s.say("node-0", stepped)


def test_a_missing_checkpoint_is_reported_after_the_loss_that_it_was_searched_for() -> None:
    s = Writing()
    s.begin(begin=checkpoint(7))
    s.feed(PlanImpossible, generation=1, **LOST)
    asked: FindCheckpoint = s.one(FindCheckpoint)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=None, skipped=(), reason="none is there")
    [failed] = s.events("JobFailed")
    assert failed.reason.startswith("layers 2 and 3 are lost; nor is there a sound checkpoint: none is there")


def test_a_loss_that_takes_two_checkpoints_is_one_loss_of_state_that_undid_the_steps_of_both() -> None:
    s = Writing()
    gone(s)
    found(s, searching(s), 4)
    failed = RestoreFailed(
        generation=s.machine.generation, detail="layer 2 is damaged", bad=("node-2",), corrupt=True
    )
    s.say("node-1", failed)
    found(s, searching(s), 3)
    assert s.machine.durable_state()["exposure"]["state_losses"] == 1
    for name in NODES:
        s.resumed(name, s.machine.generation)
    commits(s, 4)
    recovery = s.events("RecoveryCompleted")[0].details["recovery"]
    assert (recovery["rolled_back_steps"], recovery["tier"]) == (2, "persistent"), "steps 5 and 4"


def test_the_first_snapshot_after_a_return_to_a_checkpoint_is_taken_at_the_job_s_interval() -> None:
    s = Writing()
    gone(s)
    found(s, searching(s), 5)
    generation = s.machine.generation
    for name in NODES:
        s.resumed(name, generation)
        s.say(
            name,
            Heartbeat(generation=generation, committed=committed(5), lineage=generation, retained_step=0),
        )
    commits(s, 6)
    assert not s.commands(TakeSnapshot)
    commits(s, 7)
    assert s.commands(TakeSnapshot)


def test_a_node_that_is_lost_while_an_unreadable_location_is_tried_again_is_not_waited_for() -> None:
    """It was there when the state was missing, so it cannot have it."""
    s = Writing()
    s.begin(begin=checkpoint(7))
    found(s, searching(s, unheard=False), 7)
    for name in NODES:
        s.resumed(name, 1)
    commits(s, 8)
    s.note("all nodes are replaced before any snapshot is complete")
    for number, name in enumerate(NODES):
        s.feed(NodeVanished, node=name, incarnation=100 + number)
        s.hello(name, 200 + number)
        s.say(name, Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.feed(CheckpointFound, generation=searching(s).generation, **UNREADABLE)
    s.feed(NodeVanished, node="node-3", incarnation=203)
    s.fire("pause_limit", 3.0)
    assert searching(s).generation == s.machine.generation


def test_the_next_loss_is_waited_for_although_the_wait_of_an_earlier_one_was_over() -> None:
    s = Writing()
    s.train()
    commits(s, 1)
    for name in ("node-1", "node-3"):
        s.feed(NodeVanished, node=name, incarnation=s.incarnations[name])
    for name in ("node-0", "node-2"):
        s.quiesced(name, 2, report(1, held=HELD[name]))
    s.plan_or_not()
    assert "node-1 and node-3 may still hold it" in waiting_for(s)
    s.fire("pause_limit", Timing().lost_state_s)
    assert s.machine.phase is ClusterPhase.QUIESCING
    s.note("both nodes are back with their state just then, and training continues")
    for name in ("node-1", "node-3"):
        s.hello(name, s.incarnations[name], job_id="job-1", prepared=True, generation=1, training=True)
    for name in NODES:
        s.quiesced(name, 3, report(1, held=HELD[name]))
    s.plan()
    for name in NODES:
        s.resumed(name, 3)
    commits(s, 2)
    s.note("both are lost again")
    for name in ("node-1", "node-3"):
        s.feed(NodeVanished, node=name, incarnation=s.incarnations[name])
    for name in ("node-0", "node-2"):
        s.quiesced(name, 4, report(2, held=HELD[name]))
    s.plan_or_not()
    assert s.machine.phase is ClusterPhase.PAUSED
    assert "node-1 and node-3 may still hold it" in waiting_for(s)


# --- back to a snapshot ---------------------------------------------------------------------------


def half_lost() -> Snapshots:
    """Let both hosts of layers 2 and 3 die, one of which returns with its part of the snapshot of step 3."""
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.hello("node-3", 203, snapshots=(KEY,))
    return s


def test_a_host_that_is_back_with_its_part_of_the_snapshot_ends_the_wait_though_it_cannot_train() -> None:
    """It reported before that it has the part, so its Hello contains nothing new."""
    s = Snapshots()
    s.wait_for_both_hosts()
    assert "may still hold it" in waiting_for(s)
    s.hello("node-3", 103, job_id="job-1", generation=2, snapshots=(KEY,))
    assert {one.node for one in s.commands(Quiesce)} == {"node-0", "node-2"}
    s.survivors(4)
    s.plan_or_not()
    s.check()
    s.plan()
    assert {one.command.restore.step for one in s.commands(Resume)} == {3}


def restoring() -> Snapshots:
    """Return a group that restores the snapshot of step 3 in generation 3."""
    s = half_lost()
    s.survivors(3)
    s.plan_or_not()
    s.check()
    s.plan()
    assert {one.command.restore.step for one in s.commands(Resume)} == {3}
    return s


def test_where_stages_shard_a_snapshot_gives_every_device_every_part() -> None:
    s = half_lost()
    whole = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in range(LAYERS))
    for name in ("node-0", "node-2"):
        s.quiesced(name, 3, replace(report(5, held=HELD[name]), parts=whole[:2]))
    s.plan_or_not()
    s.check()
    asked: ComputePlan = s.one(ComputePlan)
    assert asked.situation.parts == {Device(node=name, index=0): whole for name in ("node-0", "node-2")}


def test_what_a_trainer_cannot_take_from_a_snapshot_is_the_trainer_s_fault() -> None:
    """The job's own trainers wrote it, so it is not the state of another model."""
    s = restoring()
    s.say("node-0", TrainerLost(generation=3, device=0, cause="foreign", detail="layer 2"))
    assert s.machine.phase is ClusterPhase.QUIESCING


def test_a_job_fails_without_its_state_although_no_trainer_ever_failed_but_a_restore() -> None:
    """A failed restore is not an error of the job's code."""
    s = restoring()
    s.say("node-0", RestoreFailed(generation=3, detail="no space left on device"))
    s.feed(NodeVanished, node="node-3", incarnation=203)
    s.survivors(4)
    s.plan_or_not()
    s.check()
    assert "may still hold it" in waiting_for(s)
    s.wait(29.0)
    s.hello("node-8", 108)
    s.fire("pause_limit", 1.0)
    s.say("node-8", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.survivors(5)
    s.quiesced("node-8", 5, report())
    s.plan_or_not()
    s.check()
    assert s.machine.phase is ClusterPhase.FAILED
    assert s.events("JobFailed")[0].reason.startswith("no usable device holds layers")


def test_a_corrupt_part_of_a_snapshot_skips_no_checkpoint() -> None:
    s = restoring()
    s.say("node-0", RestoreFailed(generation=3, detail="a digest differs", bad=("node-3",), corrupt=True))
    assert not s.events("CheckpointSkipped") and s.machine.phase is ClusterPhase.QUIESCING


# --- answers and timers that come too late -----------------------------------------------------------


def ignored(s: Coordination) -> bool:
    return any(event.name == "MessageIgnored" for event in s.all(EmitEvent))


def test_an_answer_without_a_plan_is_ignored_when_another_generation_is_planned_or_the_group_trains() -> None:
    s = running(4)
    s.feed(PlanImpossible, generation=1, **LOST)
    assert ignored(s) and s.machine.phase is ClusterPhase.RUNNING
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(1, held=(0, 1)))
    asked: ComputePlan = s.one(ComputePlan)
    s.feed(PlanImpossible, generation=asked.generation - 1, **LOST)
    assert ignored(s) and s.machine.phase is ClusterPhase.RECOVERING


def test_the_end_of_a_pause_that_is_over_changes_nothing() -> None:
    """The timer was cancelled by an event that was processed with its expiry."""
    s = running(3)
    s.feed(TimerFired, name="pause_limit")
    assert s.machine.phase is ClusterPhase.RUNNING
