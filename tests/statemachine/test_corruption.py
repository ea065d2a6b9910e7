"""Tests of the comparison of replicas: which copies differ, who is at fault, and where the job returns to."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from planner.values import Device, PipelinePlacement, Plan, StagePlacement
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.replicas import copies_of
from statemachine.cluster.rules import owned_layers
from statemachine.effects import CheckRestore, ComputePlan
from statemachine.events import (
    BrokerConnected,
    NodeVanished,
    RestoreChecked,
    SnapshotRequested,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import Resume, Stepped
from statemachine.messages.common import Finished, Prepared, Quiesce, ReplicaDigests, SnapshotStarted
from statemachine.messages.values import ClusterPhase, SnapshotPolicy
from statemachine.timing import Timing
from tests.helpers.snapshot_machine import Snapshots
from tests.helpers.transcripts import PROFILE, committed, job, report

SOUND = 7
"""Digest of every layer of which no copy is corrupt."""


class Replicas(Snapshots):
    """Nodes in pipelines of two stages, with a snapshot after every second step, whose replicas are compared."""

    def start(self, nodes: int, **policy: Any) -> None:
        self.names = [f"node-{number}" for number in range(nodes)]
        self.layers = {name: (0, 1) if number % 2 == 0 else (2, 3) for number, name in enumerate(self.names)}
        self.generation, self.lineage = 1, 0
        self.feed(BrokerConnected)
        for number, name in enumerate(self.names):
            self.hello(name, 100 + number)
        snapshot = SnapshotPolicy(**{"every_steps": 2, "protection": "aec"} | policy)
        compared = msgspec.structs.replace(job(steps=40, snapshot=snapshot), compare_replicas_every=5)
        self.feed(SubmitRequested, request="r", job=compared)
        for number, name in enumerate(self.names):
            self.say(name, Prepared(job_id="job-1", profile=PROFILE if number == 0 else None))
        self.feed(TemplatesReady, job_id="job-1")
        for name in self.names:
            self.quiesced(name, 1, report())
        self.plan()
        for name in self.names:
            self.resumed(name, 1)
        self.stepped("node-0", 1, 1)
        self.lines.clear()

    def digests(self, step: int, *names: str, kinds: dict[str, str] | None = None, **corrupt: int) -> None:
        """Report digests of these nodes, by default of all; a corrupt node's differ in its first layer."""
        for name in names or self.names:
            found = dict.fromkeys(self.layers[name], SOUND)
            found[self.layers[name][0]] = corrupt.get(name.replace("-", "_"), SOUND)
            kind = (kinds or {}).get(name, "cpu")
            self.say(
                name,
                ReplicaDigests(generation=self.generation, step=step, device=0, kind=kind, digests=found),
            )

    def snapshot(self) -> None:
        """Complete the snapshot of step 3, and compare the replicas after it."""
        for name in self.names:
            self.heartbeat(name)
        self.wait(0.1)
        self.stepped("node-0", 1, 2)
        for name in self.names:
            self.say(name, SnapshotStarted(generation=1, step=3))
        self.digests(3)
        self.completed(*self.names)
        self.stepped("node-0", 1, 3, 4, 5, 6)

    def stop(self, generation: int, *names: str, step: int = 6) -> None:
        """Let these nodes, by default all, answer the Quiesce."""
        for name in names or self.names:
            self.quiesced(name, generation, report(step, held=self.layers[name], lineage=self.lineage))


def quarantine_cause(s: Replicas, node: str) -> str:
    cause: str = s.machine.public_state()["nodes"][node]["quarantine"]["cause"]
    return cause


def replicas(nodes: int = 4, **policy: Any) -> Replicas:
    s = Replicas()
    s.start(nodes, **policy)
    return s


def test_silent_corruption() -> None:
    s = replicas(6)
    s.failure("the state of a device is corrupt, and nothing fails (a bit flipped)")
    s.snapshot()
    s.lines = s.lines[:1]
    s.note("the copies are compared after step 5: one of three differs")
    s.digests(5, node_2=8)
    s.note("all have stopped: the node with the other bits is set aside")
    s.stop(2)
    s.note("the state of none counts, since wrong gradients have reached all of them")
    s.stop(3, *(name for name in s.names if name != "node-2"))
    s.plan_or_not()
    s.wait(0.01)
    s.check()
    s.wait(0.01)
    s.plan()
    s.compare("silent_corruption")
    assert not any(name.name == "node-2" for name in s.machine._c.alive() if name.ready)


# --- who is at fault -----------------------------------------------------------------------------


def test_two_copies_that_differ_blame_nobody() -> None:
    s = replicas()
    s.snapshot()
    s.digests(5, node_3=8)
    assert len(s.commands(Quiesce)) == 4
    s.stop(2)
    (event,) = s.events("ReplicasDiverged")
    assert event.details["minority"] == [] and event.details["nodes"] == ["node-1", "node-3"]
    assert event.details["layers"] == [2] and event.details["agreed_step"] == 3
    assert not s.events("NodeQuarantined")
    s.plan_or_not()
    s.check()
    s.plan()
    assert {sent.command.step for sent in s.commands(Resume)} == {3}
    (event,) = s.events("RolledBack")
    assert "nothing says which of node-1 and node-3 is right" in event.reason


def test_under_zero1_whole_copies_of_the_parameters_are_compared() -> None:
    s = replicas()
    job_of_all = s.machine._c.current_job
    sharing = msgspec.structs.replace(job_of_all.policy, zero1=True)
    s.machine._c.job = msgspec.structs.replace(job_of_all, policy=sharing)
    for name in s.names:
        s.heartbeat(name)
    s.digests(1)
    assert s.machine._c.replicas.agreed_step == 1
    s.digests(5, node_3=8)
    assert len(s.commands(Quiesce)) == 4
    s.stop(2)
    (event,) = s.events("ReplicasDiverged")
    assert event.details["nodes"] == ["node-1", "node-3"] and event.details["agreed_step"] == 1
    devices = (Device(node="a", index=0), Device(node="a", index=1))
    stages = [
        StagePlacement(first_layer=0, end_layer=1, devices=devices, within=within)
        for within in ("shard", "replicate", "shard")
    ]
    plan = s.machine._c.resumption.plan  # type: ignore[union-attr]
    pipelines = tuple(replace(plan.pipelines[0], stages=(stage,)) for stage in stages)
    mixed = copies_of(replace(plan, pipelines=pipelines), zero1=True)
    assert mixed == {0: [("whole", (device,)) for device in devices]}
    four = tuple(Device(node="a", index=index) for index in range(4))
    by_two = StagePlacement(first_layer=0, end_layer=1, devices=four, within="tensor", replicas=2)
    alone = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(by_two,)),))
    assert copies_of(alone) == {0: [("tensor on 2", four[:2]), ("tensor on 2", four[2:])]}


def test_a_majority_proves_nothing_if_its_state_was_copied() -> None:
    """Two newcomers received the layers of node-2, whatever was in them."""
    s = replicas(6)
    s.snapshot()
    for name in ("node-6", "node-7"):
        s.hello(name, 100 + int(name[-1]))
        s.say(name, Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.stop(2)
    s.quiesced("node-6", 2, report())
    s.quiesced("node-7", 2, report())
    s.plan()
    assert s.events("PlanChosen")[0].details["transfers"] > 0
    s.names += ["node-6", "node-7"]
    plan = s.machine._c.resumption.plan  # type: ignore[union-attr]
    s.layers = {device.node: tuple(sorted(layers)) for device, layers in owned_layers(plan).items()}
    s.generation = 2
    for name in s.names:
        s.resumed(name, 2)
    s.say("node-0", Stepped(generation=2, steps=(committed(7),), step_s=0.1))
    s.digests(7, node_2=8)
    s.stop(3, step=7)
    (event,) = s.events("ReplicasDiverged")
    assert event.details["minority"] == []


def test_only_copies_in_one_layout_on_devices_of_one_kind_are_compared() -> None:
    s = replicas()
    s.snapshot()
    s.digests(5, kinds={"node-2": "gpu", "node-3": "gpu"}, node_2=8, node_3=9)
    assert not s.commands(Quiesce)
    assert s.machine._c.replicas.agreed_step == 5
    devices = [Device(node=name, index=index) for name in ("a", "b", "c") for index in (0, 1)]
    stages = [
        StagePlacement(first_layer=0, end_layer=2, devices=tuple(devices[2 * i : 2 * i + 2]), within=within)
        for i, within in enumerate(("shard", "shard", "replicate"))
    ]
    pipelines = tuple(
        PipelinePlacement(stages=(stage,), first_microbatch=i, microbatches=1, estimated_s=1.0)
        for i, stage in enumerate(stages)
    )
    plan = Plan(method="initial", reason="", pipelines=pipelines, transfers=(), estimated_iteration_s=1.0)
    layouts = [layout for layout, _ in copies_of(plan)[1]]
    assert layouts == ["shard on 2", "shard on 2", "whole", "whole"]


def test_a_node_that_died_meanwhile_does_not_hide_what_differs() -> None:
    s = replicas()
    s.snapshot()
    s.digests(5, "node-0", "node-1", "node-3", node_3=8)
    assert not s.commands(Quiesce)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.stop(2, "node-0", "node-1", "node-3")
    assert s.events("ReplicasDiverged")
    s.plan_or_not()
    s.check()
    s.plan()
    assert {sent.command.step for sent in s.commands(Resume)} == {3}


def test_of_two_nodes_with_corrupt_copies_one_is_set_aside_if_no_more_may_be() -> None:
    s = replicas(6)
    s.snapshot()
    for name in ("node-6", "node-7"):
        s.hello(name, 100 + int(name[-1]))
    for repairs in (1, 2, 3):
        s.heartbeat("node-7", repairs=repairs)
    s.hello("node-7", 207)
    assert quarantine_cause(s, "node-7") == "checksum", "so two of the eight nodes may be set aside"
    s.digests(5, node_2=8, node_3=8)
    s.stop(2)
    assert [event.node for event in s.events("NodeQuarantined")] == ["node-2"]
    assert [event.node for event in s.events("QuarantineSkipped")] == ["node-3"]
    assert s.machine.generation == 3, "the others go on without node-2"


def test_a_node_that_was_set_aside_for_less_and_has_corrupt_copies_is_not_readmitted_by_need() -> None:
    s = replicas(6)
    s.snapshot()
    s.digests(5, *(name for name in s.names if name != "node-5"), node_2=8)
    for repairs in (1, 2, 3):
        s.heartbeat("node-2", retained_step=3, repairs=repairs)
    assert quarantine_cause(s, "node-2") == "checksum"
    s.stop(2, *(name for name in s.names if name != "node-2"))
    assert s.events("ReplicasDiverged") and quarantine_cause(s, "node-2") == "corruption"


# --- snapshots, and where the job returns to --------------------------------------------------------


def test_a_snapshot_counts_only_once_its_step_was_compared() -> None:
    s = replicas()
    s.snapshot()
    for name in s.names:
        s.heartbeat(name, retained_step=3)
    for name in s.names:
        s.say(name, SnapshotStarted(generation=1, step=6))
    s.completed(*s.names, step=6)
    assert s.machine.cluster.snapshots.newest.step == 3
    s.digests(6, node_0=8)
    assert s.commands(Quiesce) and s.machine.cluster.snapshots.newest.step == 3


def test_a_snapshot_that_is_not_compared_in_time_is_abandoned() -> None:
    s = replicas()
    for name in s.names:
        s.heartbeat(name)
    s.stepped("node-0", 1, 2)
    s.completed(*s.names)
    assert s.machine.cluster.snapshots.newest is None
    s.fire("snapshot", 61.0)
    (event,) = s.events("SnapshotAbandoned")
    assert "not known in time whether its state is sound" in event.reason


def test_without_a_snapshot_the_job_fails_and_names_the_nodes() -> None:
    s = replicas(every_steps=0)
    s.stepped("node-0", 1, 2, 3, 4, 5, 6)
    s.digests(5, node_0=8)
    s.stop(2)
    s.plan_or_not()
    (event,) = s.events("JobFailed")
    assert "node-0 and node-2" in event.reason and "no snapshot was complete" in event.reason


def test_without_a_snapshot_no_absent_node_is_waited_for_since_its_state_may_be_corrupt_too() -> None:
    s = replicas(every_steps=0)
    s.stepped("node-0", 1, 2, 3, 4, 5, 6)
    s.digests(5, node_0=8)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.stop(2, "node-0", "node-1", "node-2")
    s.plan_or_not()
    assert s.machine.phase is ClusterPhase.FAILED


def test_what_differs_after_every_rollback_ends_the_job() -> None:
    s = replicas()
    s.snapshot()
    for attempt in range(4):
        generation = 2 + attempt
        s.digests(5, node_0=8)
        s.stop(generation)
        s.plan_or_not()
        if attempt == 3:
            break
        s.check()
        s.plan()
        s.generation = s.lineage = generation
        for name in s.names:
            s.resumed(name, generation)
    (event,) = s.events("JobFailed")
    assert "again after 3 rollbacks" in event.reason
    assert s.machine.phase is ClusterPhase.FAILED
    assert not s.all(CheckRestore), "there is no fourth rollback"


def test_a_takeover_does_not_forget_what_differs() -> None:
    s = replicas()
    s.snapshot()
    s.digests(5, node_0=8)
    kept = s.machine.durable_state()
    machine, _ = ClusterMachine.restore(Timing(), kept, s.now, "test")
    s.machine = machine
    s.feed(BrokerConnected)
    for number, name in enumerate(s.names):
        s.hello(name, 100 + number, job_id="job-1", prepared=True, generation=2, quiesced=True)
    s.stop(machine.generation)
    assert s.events("ReplicasDiverged")
    s.feed(TemplatesReady, job_id="job-1")
    assert not any(s.one(ComputePlan).situation.holdings.values())
    s.plan_or_not()
    assert s.machine._c.snapshots.newest is not None


def take_over(s: Replicas) -> None:
    """Let another coordinator restore the journal, while all nodes train."""
    s.machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "test")
    s.feed(BrokerConnected)
    for number, name in enumerate(s.names):
        s.hello(name, 100 + number, job_id="job-1", prepared=True, generation=1, training=True)


def finish(s: Replicas, *nodes: str, digest: str) -> None:
    """Let all nodes finish, these with this digest of layer 2."""
    for name in s.names:
        digests = dict.fromkeys(s.layers[name], str(SOUND))
        if name in nodes:
            digests[2] = digest
        s.say(name, Finished(generation=1, step=40, digests=digests, kind="cpu"))


def test_corruption_that_is_found_at_a_boundary_is_the_cause_of_the_recovery() -> None:
    s = replicas()
    s.snapshot()
    s.feed(SnapshotRequested, request="r", protection="none")
    assert {sent.command.mode for sent in s.commands(Quiesce)} == {"boundary"}
    s.digests(5, "node-0", "node-1", "node-2", node_0=8)
    s.stop(2)
    assert s.events("ReplicasDiverged")
    record = s.machine._c.recovery
    assert record is not None and (record.cause, record.nodes) == ("corruption", ["node-0", "node-2"])


def test_corruption_of_one_node_that_is_found_at_a_boundary_names_that_node_alone() -> None:
    s = replicas(6)
    s.snapshot()
    s.feed(SnapshotRequested, request="r", protection="none")
    s.digests(5, *s.names[:5], node_2=8)
    s.stop(2)
    record = s.machine._c.recovery
    assert record is not None and (record.cause, record.nodes) == ("corruption", ["node-2"])


@pytest.mark.parametrize("taken_over", [False, True])
def test_parameters_are_compared_after_the_last_step(taken_over: bool) -> None:
    s = replicas()
    s.snapshot()
    s.stepped("node-0", 1, *range(7, 41))
    if taken_over:
        take_over(s)
    finish(s, "node-1", digest="8")
    assert not s.events("JobFinished") and len(s.commands(Quiesce)) == 4
    s.stop(2, step=40)
    assert s.events("ReplicasDiverged")


def test_a_node_whose_own_parameters_differ_after_the_last_step_is_at_fault() -> None:
    s = replicas()
    s.snapshot()
    s.stepped("node-0", 1, *range(7, 41))
    finish(s, "node-1", digest=f"8|{SOUND}")
    s.stop(2, step=40)
    (event,) = s.events("ReplicasDiverged")
    assert event.details["minority"] == ["node-1"]


@pytest.mark.parametrize("step", [3, 5])
def test_digests_that_come_late_are_ignored(step: int) -> None:
    s = replicas()
    s.snapshot()
    s.digests(5)
    s.digests(step, "node-0", node_0=8)
    assert s.events("MessageIgnored")
    assert not s.machine._c.replicas.reported


def test_a_check_that_finds_the_snapshot_lost_does_not_wait_for_absent_trainers() -> None:
    s = replicas()
    s.snapshot()
    s.digests(5, node_0=8)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.stop(2, "node-0", "node-1", "node-2")
    s.plan_or_not()
    s.feed(RestoreChecked, generation=2, possible=False, reason="a part is missing", tier="")
    (event,) = s.events("ClusterPaused")
    assert "waiting for their return" in event.reason  # node-3 may come back with its part of the snapshot.
