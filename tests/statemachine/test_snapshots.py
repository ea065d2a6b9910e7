"""Tests of a snapshot's life, a rollback, and their interruptions: word for word, and case by case."""

from typing import Any

import pytest

from ftd.coordinator.restore_check import check_restore
from planner.values import Device
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots import snapshots
from statemachine.effects import BroadcastCommand, CheckRestore, ComputePlan, PersistState
from statemachine.events import (
    BrokerConnected,
    NodeVanished,
    PlanImpossible,
    RestoreChecked,
    SnapshotRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import (
    Heartbeat,
    RequestHello,
    RestoreFailed,
    Resume,
    RetainSnapshot,
    Stepped,
    TakeSnapshot,
    TrainerLost,
)
from statemachine.messages.common import Prepared, Quiesce, SnapshotFailed, SnapshotStarted
from statemachine.messages.values import NodeState
from statemachine.timing import Timing
from tests.helpers.snapshot_machine import HELD, KEY, Snapshots
from tests.helpers.transcripts import committed, report

NAMES = list(HELD)


def test_a_snapshot_s_life() -> None:
    s = Snapshots()
    s.begin()
    s.note("two steps are committed: the node of rank 0 gets the order")
    s.ordered()
    s.note("it begins on every node")
    for name in HELD:
        s.say(name, SnapshotStarted(generation=1, step=3))
    s.wait(0.1)
    s.stepped("node-0", 1, 3)
    s.note("it counts once the last node has completed its part")
    s.completed(*HELD)
    s.note("no other snapshot before all nodes have confirmed that they retain this one")
    s.wait(0.1)
    s.stepped("node-0", 1, 4, 5)
    for name in HELD:
        s.heartbeat(name, retained_step=3)
    s.compare("a_snapshot_s_life")


def test_a_snapshot_interrupted_by_a_failure() -> None:
    s = Snapshots()
    s.begin()
    s.ordered()
    s.say("node-0", SnapshotStarted(generation=1, step=3))
    s.note("node-3 dies before it has its part")
    s.completed("node-0", "node-1", "node-2")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.note("late messages do not count")
    s.completed("node-2")
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(3, held=HELD[name]))
    s.plan()
    s.compare("a_snapshot_interrupted")


def test_a_rollback() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.note("both hosts of layers 2 and 3 die; one comes back with its memory")
    s.both_hosts_die()
    s.hello("node-3", 203, snapshots=(KEY,))
    s.survivors(3)
    s.note("no live node holds layers 2 and 3, but the snapshot can be decoded without node-1")
    s.plan_or_not()
    s.wait(0.01)
    s.check()
    s.wait(0.01)
    s.plan()
    s.note("the survivors go back from step 5, and redo steps 4 and 5")
    s.wait(0.3)
    for name in ("node-0", "node-2"):
        s.resumed(name, 3)
    signal = Stepped(generation=3, steps=(committed(4), committed(5)), step_s=0.1, lineage=3)
    s.say("node-0", signal)
    s.compare("a_rollback")


# --- snapshots, case by case ---------------------------------------------------------------------


def test_one_is_durable_before_its_predecessor_is_released() -> None:
    s = Snapshots()
    s.begin()
    s.ordered()
    s.completed("node-0", "node-1", "node-2")
    assert not s.commands(RetainSnapshot)
    s.completed("node-3")
    kinds = [type(effect) for effect in s.last]
    assert kinds.index(PersistState) < kinds.index(BroadcastCommand)
    assert len(s.commands(RetainSnapshot)) == 4
    snapshot = s.machine.durable_state()["snapshot"]
    assert snapshot["step"] == 3
    assert [list(group["owners"]) for group in snapshot["groups"]] == [
        ["node-0", "node-2"],
        ["node-1", "node-3"],
    ]


def test_an_order_without_effect_is_abandoned_and_repeated() -> None:
    s = Snapshots()
    s.begin()
    s.ordered()
    assert [sent.node for sent in s.commands(TakeSnapshot)] == ["node-0"]
    s.fire("snapshot", 61.0)
    assert s.events("SnapshotAbandoned")
    s.stepped("node-0", 1, 3)
    assert not s.commands(TakeSnapshot)
    s.stepped("node-0", 1, 4)
    assert s.commands(TakeSnapshot)


def test_a_slow_node_leaves_the_previous_snapshot() -> None:
    s = Snapshots()
    s.complete_snapshot()
    for name in HELD:
        s.heartbeat(name, retained_step=3)
    assert s.machine.cluster.snapshots.newest.step == 3
    s.say("node-0", SnapshotStarted(generation=1, step=6))
    s.completed("node-0", "node-1", "node-2", step=6)
    s.fire("snapshot", 61.0)
    (abandoned,) = s.events("SnapshotAbandoned")
    assert "node-3 did not complete it" in abandoned.reason
    assert abandoned.details["last_complete_step"] == 3
    s.completed("node-3", step=6)
    assert not s.commands(RetainSnapshot)
    assert s.machine.cluster.snapshots.newest.step == 3


def test_a_full_arena_abandons_the_snapshot_and_training_continues() -> None:
    s = Snapshots()
    s.begin()
    s.ordered()
    s.say("node-2", SnapshotStarted(generation=1, step=3))
    assert s.machine.public_state()["nodes"]["node-2"]["state"] == NodeState.SNAP
    s.say("node-2", SnapshotFailed(generation=1, step=3, detail="the arena is full"))
    (abandoned,) = s.events("SnapshotAbandoned")
    assert abandoned.reason == "node-2: the arena is full"
    assert s.machine.phase == "RUNNING"
    assert s.machine.public_state()["nodes"]["node-2"]["state"] == NodeState.HEALTHY


def test_messages_of_another_generation_or_an_abandoned_snapshot_do_not_count() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.completed(*HELD)  # again
    s.completed(*HELD, generation=7, step=9)
    assert not s.commands(RetainSnapshot)
    assert s.machine.cluster.snapshots.newest.step == 3


def test_a_node_that_retains_a_snapshot_which_no_journal_knows_does_not_prevent_the_next_one() -> None:
    s = Snapshots()
    s.begin()
    for name in HELD:
        s.heartbeat(name, retained_step=1 if name == "node-2" else 0)
    s.wait(0.1)
    s.stepped("node-0", 1, 2)
    assert s.commands(TakeSnapshot)


def test_retain_is_repeated_until_a_heartbeat_confirms_it() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.wait(1.0)
    s.heartbeat("node-1", retained_step=0)
    assert not s.commands(RetainSnapshot)  # With the others that did not confirm it.
    s.look()
    [published] = [sent.command for sent in s.commands(RetainSnapshot)]
    assert isinstance(published, RetainSnapshot) and (published.job_id, published.step, published.pinned) == (
        "job-1",
        3,
        0,
    )
    assert (
        published.restore is not None
        and published.restore.groups == s.machine.cluster.snapshots.newest.groups
    )
    assert set(published.restore.sources) == {"node-0", "node-1", "node-2", "node-3"}
    s.wait(1.0)
    s.heartbeat("node-1", retained_step=0)
    s.heartbeat("node-1", retained_step=3)
    s.look()
    assert not s.commands(RetainSnapshot)


def test_retain_is_repeated_to_many_nodes_at_once_and_to_a_few_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.wait(1.0)
    for name in NAMES[:3]:
        s.heartbeat(name)
    s.look()
    assert set(s.one(BroadcastCommand).receivers) == set(NAMES[:3])
    s.wait(0.3)
    for name in HELD:
        s.heartbeat(name)
    s.look()
    assert [sent.node for sent in s.commands(RetainSnapshot)] == [NAMES[3]]  # The others have yet to answer.
    monkeypatch.setattr(snapshots, "FEW_SHARE", 1)
    s.wait(1.0)
    for name in NAMES[:3]:
        s.heartbeat(name)
    s.look()
    assert not s.all(BroadcastCommand)
    assert [sent.node for sent in s.commands(RetainSnapshot)] == NAMES[:3]


def test_a_part_beyond_repair_leads_to_a_new_snapshot_at_once() -> None:
    s = Snapshots()
    s.begin(every_steps=30)

    def ordered() -> bool:
        there = any("command=TakeSnapshot(" in line for line in s.lines)
        s.lines.clear()
        return there

    for name in HELD:
        s.heartbeat(name)
    s.stepped("node-0", 1, *range(2, 31))
    assert ordered()
    s.completed(*HELD, step=32)
    s.stepped("node-0", 1, 31, 32, 33)
    for name in HELD:
        s.heartbeat(name, retained_step=32)
    s.heartbeat("node-1", retained_step=32, corrupt_step=9)
    s.stepped("node-0", 1, 34)
    assert not ordered()
    s.heartbeat("node-1", retained_step=32, corrupt_step=32)
    assert ordered()
    s.completed(*HELD, step=36)
    assert s.machine.cluster.snapshots.newest.step == 36


def test_a_corrupt_part_counts_once_against_its_node_whichever_incarnation_reports_it() -> None:
    s = Tried()
    s.begin_with_one()
    s.heartbeat("node-1", retained_step=22, corrupt_step=22)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.hello("node-1", 201)
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.heartbeat("node-1", retained_step=22, corrupt_step=22)
    node = s.machine._c.nodes["node-1"]
    assert node.incarnation == 201 and sum(node.part_failures.values()) == 1
    assert [failure.cause for failure in node.failures] == ["checksum"]


def test_a_lost_snapshot_order_is_sent_again_and_a_lost_completion_requested() -> None:
    s = Snapshots()
    s.begin()
    s.ordered()
    assert s.acknowledge("node-1") == [], "only the node of rank 0 gets the order"
    assert s.acknowledge("node-0", generation=0) == [], "this heartbeat was sent before the group formed"
    assert TakeSnapshot in {type(command) for command in s.acknowledge("node-0")}
    assert s.acknowledge("node-0", snap_after=2) == []
    s.say("node-0", SnapshotStarted(generation=1, step=3))
    s.completed("node-0", "node-2", "node-3")
    assert s.acknowledge("node-0", snap_after=2, snapshot_reported=3) == []
    assert s.acknowledge("node-1", snapshot_reported=1) == [], "that is another snapshot"
    assert {type(command) for command in s.acknowledge("node-1", snapshot_reported=3)} == {RequestHello}


class Tried(Snapshots):
    """One snapshot is retained, of step 22; the next is due after step 40."""

    def begin_with_one(self) -> None:
        self.begin(every_steps=20)
        for name in HELD:
            self.heartbeat(name)
        self.train(20)
        self.completed(*HELD, step=22)
        self.train(24)
        for name in HELD:
            self.heartbeat(name, retained_step=22)
        self.lines.clear()

    def train(self, last: int) -> bool:
        """Return whether a snapshot is ordered by then."""
        for step in range(self.machine.cluster.progress.known_step + 1, last + 1):
            self.stepped("node-0", 1, step)
        return self.was_ordered()

    def was_ordered(self) -> bool:
        there = any("command=TakeSnapshot(" in line for line in self.lines)
        self.lines.clear()
        return there

    def fail(self, step: int) -> None:
        self.say("node-2", SnapshotStarted(generation=1, step=step))
        self.say("node-2", SnapshotFailed(generation=1, step=step, detail="the arena is full"))


def test_an_urgent_snapshot_that_is_abandoned_is_retried_while_training_continues() -> None:
    s = Tried()
    s.begin_with_one()
    s.heartbeat("node-1", retained_step=22, corrupt_step=22)
    assert s.was_ordered()
    s.fail(26)
    assert not s.train(25)
    assert s.train(26)
    s.fail(28)
    assert not s.train(29)
    assert s.train(30)
    s.completed(*HELD, step=32)
    for name in HELD:
        s.heartbeat(name, retained_step=32)
    assert not s.train(36)


def test_a_snapshot_is_taken_at_once_after_a_recovery_that_left_the_newest_incomplete() -> None:
    s = Tried()
    s.begin_with_one()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(24, held=HELD[name]))
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
        s.say(name, Heartbeat(generation=2, committed=committed(24), retained_step=22))
    s.stepped("node-0", 2, 25)
    assert s.was_ordered(), "the next one would be due after step 42"


def test_a_requested_snapshot_is_taken_in_the_end_whichever_node_fails() -> None:
    s = Tried()
    s.begin_with_one()
    s.feed(SnapshotRequested, request="now", now=True)
    assert s.was_ordered()
    s.fail(26)
    machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.machine = machine
    s.feed(BrokerConnected)
    s.feed(TemplatesReady, job_id="job-1")
    for number, name in enumerate(HELD):
        s.hello(name, 100 + number, job_id="job-1", prepared=True, generation=1, training=True)
        s.heartbeat(name, retained_step=22)
    assert s.train(26)
    s.completed(*HELD, step=28)
    for name in HELD:
        s.heartbeat(name, retained_step=28)
    assert not s.train(32)


def test_a_coordinator_restarted_during_a_snapshot_follows_it_on() -> None:
    s = Snapshots()
    s.begin()
    s.ordered()
    s.completed("node-0", "node-1")
    machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.machine = machine
    s.feed(BrokerConnected)
    for number, name in enumerate(HELD):
        at = {"job_id": "job-1", "prepared": True, "generation": 1, "training": True}
        s.hello(name, 100 + number, **at)
        s.say(name, SnapshotStarted(generation=1, step=3))
        s.completed(name)
    assert len(s.commands(RetainSnapshot)) == 4
    assert s.machine.cluster.snapshots.newest.step == 3


# --- rollbacks, case by case ----------------------------------------------------------------------


def test_a_crash_with_live_replicas_left_undoes_nothing() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(5, held=HELD[name]))
    s.plan_or_not()
    assert not s.all(CheckRestore)
    assert {sent.command.restore for sent in s.commands(Resume)} == {None}
    assert s.machine.cluster.progress.known_step == 5


def rolled_back() -> Snapshots:
    """Return a script in which generation 3 was ordered to go back to step 3 and no node has reported since."""
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.hello("node-3", 203, snapshots=(KEY,))
    s.survivors(3)
    s.plan_or_not()
    s.check()
    s.plan()
    return s


def test_the_resume_says_where_the_state_comes_from() -> None:
    s = rolled_back()
    resume = s.commands(Resume)[0].command
    assert (resume.step, resume.lineage, resume.protection) == (3, 3, "aec")
    assert (resume.restore.step, resume.restore.generation) == (3, 1)
    assert sorted(resume.restore.sources) == ["node-0", "node-2", "node-3"]
    assert not resume.plan.transfers
    (published,) = s.events("RolledBack")
    assert published.details["tier"] == "decoded"
    assert (
        published.details["from_step"],
        published.details["to_step"],
        published.details["undone_steps"],
    ) == (5, 3, 2)
    assert "no usable device holds layers 2" in published.reason
    assert s.machine.cluster.progress.known_step == 3


def test_an_error_of_all_trainers_is_named_before_its_consequence() -> None:
    s = Snapshots()
    s.begin()
    said = "Traceback …\n  File …\nValueError: nan"
    for name in ("node-0", "node-2"):
        s.say(name, TrainerLost(generation=s.machine.generation, device=0, cause="raised", detail=said))
    s.quiesced("node-1", s.machine.generation, report(5, held=HELD["node-1"]))
    s.quiesced("node-3", s.machine.generation, report(5, held=HELD["node-3"]))
    s.plan_or_not()
    [published] = s.events("JobFailed")
    assert published.reason.startswith(
        "the job's code raised, ValueError: nan, and then no usable device holds"
    )
    assert published.reason.endswith(said)


def test_trainers_that_did_not_obey_the_rollback_hold_nothing() -> None:
    s = rolled_back()
    s.feed(NodeVanished, node="node-3", incarnation=203)  # it has shards that are being read
    asked = s.machine.generation
    assert asked == 4
    s.quiesced("node-0", 4, report(3, held=HELD["node-0"], lineage=3))
    s.quiesced("node-2", 4, report(5, held=HELD["node-2"]))  # of the past that was undone
    assert s.one(ComputePlan).situation.holdings[Device(node="node-2", index=0)] == frozenset()
    assert s.machine.cluster.progress.known_step == 3


def test_heartbeats_of_another_lineage_do_not_count() -> None:
    s = rolled_back()
    s.say("node-0", Heartbeat(generation=3, committed=committed(5), lineage=0))
    assert s.machine.cluster.progress.known_step == 3
    s.say("node-0", Heartbeat(generation=3, committed=committed(4), lineage=3))
    assert s.machine.cluster.progress.known_step == 4


def test_without_its_shards_the_cluster_waits_for_nodes_that_may_have_them() -> None:
    s = Snapshots()
    s.wait_for_both_hosts()
    assert s.machine.phase == "PAUSED"
    assert "node-1 and node-3 may still hold it" in s.machine.public_state()["waiting_for"]
    s.note("a host returns and has checked its memory")
    s.hello("node-3", 203)
    s.hello("node-3", 203, snapshots=(KEY,))
    assert s.machine.phase == "QUIESCING"
    s.survivors(4)
    s.plan_or_not()
    assert s.one(CheckRestore).present == ("node-0", "node-2", "node-3")


def test_the_job_is_lost_if_no_node_returns() -> None:
    s = Snapshots()
    s.wait_for_both_hosts()
    s.fire("pause_limit", 30.0)
    assert s.machine.phase == "FAILED"


def test_a_node_that_returns_during_the_check_is_checked_again() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.survivors(3)
    s.plan_or_not()
    asked = s.one(CheckRestore)
    s.hello("node-3", 203, snapshots=(KEY,))
    s.feed(RestoreChecked, generation=asked.generation, possible=False, reason="node-1 and node-3 are lost")
    assert s.one(CheckRestore).present == ("node-0", "node-2", "node-3")


def test_damaged_shards_are_left_out_the_next_time() -> None:
    s = rolled_back()
    s.say("node-0", RestoreFailed(generation=3, detail="a digest differs", bad=("node-3",)))
    assert s.machine.phase == "QUIESCING"
    s.hello("node-3", 203, snapshots=(KEY,), generation=3)
    s.quiesced("node-0", 4, report(5, held=HELD["node-0"]))
    s.quiesced("node-2", 4, report(5, held=HELD["node-2"]))
    s.plan_or_not()
    assert s.one(CheckRestore).present == ("node-0", "node-2")


def test_a_coordinator_killed_right_after_a_rollback_continues_it() -> None:
    s = rolled_back()
    assert s.one(PersistState) is s.last[0] and len(s.events("RolledBack")) == 1
    machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.machine = machine
    assert machine.cluster.progress.known_step == 3
    s.feed(BrokerConnected)
    assert not s.events("RolledBack"), "it was in the journal, to be published, with the rollback itself"
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=3, training=False, quiesced=True)
    assert s.commands(Resume)[0].command.restore.step == 3


# --- rollbacks, case by case ---------------------------------------------------------------------


def rolling_back() -> Snapshots:
    """Let node-1 and node-3 die and node-3 return with its memory, while the planner misses layers 2 and 3."""
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.hello("node-3", 203, snapshots=(KEY,))
    s.survivors(3)
    s.plan_or_not()
    return s


def answered(s: Snapshots, asked: CheckRestore, **others: Any) -> None:
    """Answer a check as the coordinator does, or with other values."""
    found = check_restore(asked, s.now)
    answer = {name: getattr(found, name) for name in ("generation", "possible", "reason", "tier")}
    s.feed(RestoreChecked, **answer | others)


def test_a_check_counts_only_for_its_generation_and_if_it_was_requested() -> None:
    s = rolling_back()
    asked = s.one(CheckRestore)
    answered(s, asked, generation=2)
    assert s.events("MessageIgnored") and not s.all(ComputePlan)
    answered(s, asked)
    assert s.one(ComputePlan).generation == 3
    s.plan()
    answered(s, asked)
    assert s.events("MessageIgnored") and not s.all(ComputePlan)
    other = Snapshots()
    other.begin()
    answered(other, asked, generation=1)
    assert other.events("MessageIgnored") and not other.all(ComputePlan)
    other.both_hosts_die()
    other.survivors(3)
    answered(other, asked)
    assert other.events("MessageIgnored") and not other.all(ComputePlan), "it has no snapshot"


def test_a_snapshot_is_checked_once_and_only_for_lost_layers() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.survivors(3)
    s.feed(PlanImpossible, generation=3, too_few=False, reason="another model", lost_layers=())
    assert not s.all(CheckRestore) and s.machine.phase == "PAUSED"
    s = rolling_back()
    answered(s, s.one(CheckRestore))
    s.feed(PlanImpossible, generation=3, too_few=False, reason="again", lost_layers=(2, 3))
    assert not s.all(CheckRestore)


def test_a_snapshot_that_can_be_restored_is_not_checked_again_for_returned_nodes() -> None:
    s = rolling_back()
    asked = s.one(CheckRestore)
    s.hello("node-1", 201, snapshots=(KEY,))
    answered(s, asked)
    assert s.one(ComputePlan).generation == 3 and not s.all(CheckRestore)


def test_a_node_whose_part_is_unavailable_three_times_counts_as_having_lost_it() -> None:
    s = rolling_back()
    for generation in (3, 4, 5):
        if generation > 3:
            s.survivors(generation)
            s.plan_or_not()
            assert s.one(CheckRestore).present == ("node-0", "node-2"), "without the part that failed"
            s.check()
        assert s.one(CheckRestore).present == ("node-0", "node-2", "node-3")
        s.check()
        s.plan()
        assert {sent.node for sent in s.commands(Resume)} == {"node-0", "node-2"}
        failed = RestoreFailed(generation=generation, detail="the part is damaged", bad=("node-3", "node-9"))
        s.say("node-0", failed)
        [published] = s.events("RestoreFailed")
        assert (published.node, published.reason, published.details["bad"]) == (
            "node-0",
            "the part is damaged",
            ["node-3", "node-9"],
        )
        assert {sent.command.mode for sent in s.commands(Quiesce)} == {"abort"}
    s.survivors(6)
    s.plan_or_not()
    s.check()
    assert not s.all(CheckRestore)
    waiting = s.machine.public_state()["waiting_for"]
    assert "nor can the snapshot of step 3 be restored" in waiting and "node-1 may still hold it" in waiting


def test_a_node_that_cannot_restore_by_its_own_fault_fails_the_job_the_third_time() -> None:
    s = rolling_back()
    for generation in (3, 4, 5):
        assert s.machine.phase != "FAILED"
        if generation > 3:
            s.survivors(generation)
            s.plan_or_not()
        s.check()
        s.plan()
        s.say("node-0", RestoreFailed(generation=generation, detail="no room"))
    assert s.machine.phase == "FAILED"
    outcome = s.machine.public_state()["outcome"]
    assert outcome.startswith("node-0 cannot restore the snapshot of step 3: no room")


def test_a_failed_restore_counts_only_for_the_group_that_restores() -> None:
    s = rolling_back()
    s.check()
    s.plan()
    s.say("node-0", RestoreFailed(generation=2, detail="late", bad=("node-3",)))
    assert s.events("MessageIgnored") and not s.commands()
    for name in ("node-0", "node-2"):
        s.resumed(name, 3)
    s.say("node-0", RestoreFailed(generation=3, detail="late", bad=("node-3",)))
    assert s.events("MessageIgnored") and not s.commands() and not s.events("RestoreFailed")
    fresh = Snapshots()
    fresh.begin()
    fresh.say("node-0", RestoreFailed(generation=1, detail="of nothing"))
    assert fresh.events("MessageIgnored") and not fresh.commands()


def test_a_rollback_reports_what_it_undid_and_no_node_is_ahead_of_it() -> None:
    s = rolling_back()
    s.check()
    s.plan()
    steps = {name: node["step"] for name, node in s.machine.public_state()["nodes"].items()}
    assert max(steps.values()) == 3 and s.machine.cluster.progress.known_step == 3
    assert s.machine.durable_state()["snapshot_last_order_step"] == 3
    [published] = s.events("RolledBack")
    assert {
        key: published.details[key] for key in ("from_step", "to_step", "undone_steps", "tier", "sources")
    } == {
        "from_step": 5,
        "to_step": 3,
        "undone_steps": 2,
        "tier": "decoded",
        "sources": ["node-0", "node-2", "node-3"],
    }
    for name in ("node-0", "node-2"):
        s.resumed(name, 3)
    s.say("node-0", Stepped(generation=3, steps=(committed(4),), step_s=0.1, lineage=3))
    [completed] = s.events("RecoveryCompleted")
    recovery = completed.details["recovery"]
    assert (recovery["rolled_back_steps"], recovery["tier"]) == (2, "decoded")


def test_nodes_that_may_still_hold_the_state_are_named() -> None:
    s = Snapshots()
    s.begin()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(1, held=HELD[name]))
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    s.hello("node-4", 104)
    s.feed(NodeVanished, node="node-4", incarnation=104)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-2", incarnation=102, graceful=True)
    s.quiesced("node-0", 3, report(2, held=(2,)))
    s.feed(PlanImpossible, generation=3, too_few=False, reason="layers are lost", lost_layers=(0, 1, 3))
    assert s.machine.public_state()["waiting_for"] == (
        "layers are lost; node-1 may still hold it: waiting for their return for 30 s, then the job fails"
    ), "not node-3, without which a step was done, nor node-4, which never took part, nor node-2, which left"


def test_a_holder_of_a_snapshot_part_is_named_once_while_it_may_return() -> None:
    s = Snapshots()
    s.wait_for_both_hosts()
    waiting = s.machine.public_state()["waiting_for"]
    assert (
        "; node-3 and node-1 may still hold it" in waiting
        or "; node-1 and node-3 may still hold it" in waiting
    )
    s.hello("node-3", 203)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.survivors(4)
    s.quiesced("node-3", 4, report())
    s.plan_or_not()
    s.check()
    assert "node-1 and node-3 may still hold it" in s.machine.public_state()["waiting_for"], (
        "its memory is yet to be read"
    )
    s.hello("node-3", 203, job_id="job-1", prepared=True, generation=4, quiesced=True, snapshots=(KEY,))
    asked = [(sent.node, sent.command.mode) for sent in s.commands(Quiesce)]
    assert sorted(asked) == [(name, "abort") for name in ("node-0", "node-2", "node-3")], "each is asked once"


def test_a_part_of_the_snapshot_does_not_end_a_pause_for_more_nodes() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.survivors(3)
    s.feed(PlanImpossible, generation=3, too_few=True, reason="too few", needed=3)
    s.hello("node-3", 203, snapshots=(KEY,))
    assert s.machine.phase == "PAUSED" and not s.commands(Quiesce), "its trainers have yet to build the job"


def test_a_node_that_lost_its_trainers_still_has_its_part_of_the_snapshot() -> None:
    s = rolling_back()
    s.say("node-3", TrainerLost(generation=0, device=0, cause="exited", detail=""))
    assert s.machine.generation == 3 and not s.commands(Quiesce)
    s.feed(NodeVanished, node="node-3", incarnation=203)
    assert s.machine.generation == 4, "its memory is gone"
