"""Tests of replica peers: which node holds a copy for which, and a snapshot of one pipeline, from the order to
the rollback.
"""

from typing import Any

import pytest

from ftd.coordinator.restore_check import check_restore
from planner.values import Device, PipelinePlacement, Plan, StagePlacement
from statemachine.cluster.snapshots.replica_peers import choose_replica_peers
from statemachine.effects import CheckRestore, ComputePlan, EmitEvent
from statemachine.events import (
    BrokerConnected,
    NodeVanished,
    PlanImpossible,
    RestoreChecked,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import Heartbeat, Resume, SnapshotCompleted
from statemachine.messages.common import Prepared, Quiesce, SnapshotStarted
from statemachine.messages.values import HeldSnapshot, NodeFacts, ReplicaPeer, SnapshotPolicy
from tests.helpers.transcripts import PROFILE, Coordination, committed, job, report, vote


def plan_of(*pipelines: tuple[str, ...], idle: tuple[str, ...] = ()) -> Plan:
    return Plan(
        pipelines=tuple(
            PipelinePlacement(
                stages=tuple(
                    StagePlacement(first_layer=n, end_layer=n + 1, devices=(Device(node=name, index=0),))
                    for n, name in enumerate(nodes)
                ),
                first_microbatch=0,
                microbatches=1,
                estimated_s=1.0,
            )
            for nodes in pipelines
        ),
        transfers=(),
        method="initial",
        reason="",
        estimated_iteration_s=1.0,
        idle_nodes=idle,
    )


@pytest.mark.parametrize(
    ("nodes", "able", "expected"),
    [
        ("abc", "abc", {"a": "b", "b": "c", "c": "a"}),
        ("cab", "abc", {"c": "a", "a": "b", "b": "c"}),
        ("ab", "abd", {"a": "b", "b": "d"}),
        ("a", "az", {"a": "z"}),
        ("a", "a", {}),
        ("abc", "ac", {"a": "c", "b": "c", "c": "a"}),
        ("abb", "ab", {"a": "b", "b": "a"}),
    ],
)
def test_the_replica_peer_is_the_next_node_in_the_order_of_the_plan(
    nodes: str, able: str, expected: dict[str, str]
) -> None:
    plan = plan_of(tuple(nodes))
    assert choose_replica_peers(plan, "aec+buddy", set(able)) == expected
    assert choose_replica_peers(plan, "buddy", list(able)) == expected
    assert choose_replica_peers(plan, "aec", set(able)) == {}
    assert choose_replica_peers(plan_of(tuple(nodes), ("x", "y", "z")), "aec+buddy", set(able)) == {}


class Alone(Coordination):
    """Two nodes of one pipeline, with layers 0 and 1 on the first, and a snapshot after every second step."""

    def hello(self, node: str, incarnation: int, **says: Any) -> Any:
        facts = NodeFacts(devices=1, host=f"host-{node}", rendezvous_port=7000, snapshot_port=7001)
        return super().hello(node, incarnation, **{"facts": facts, **says})

    def begin(self, names: tuple[str, ...] = ("node-0", "node-1")) -> None:
        self.feed(BrokerConnected)
        for number, name in enumerate(names):
            self.hello(name, 100 + number)
        policy = SnapshotPolicy(every_steps=2, protection="aec+buddy")
        self.feed(SubmitRequested, request="r", job=job(steps=40, snapshot=policy))
        for number, name in enumerate(names):
            self.say(name, Prepared(job_id="job-1", profile=PROFILE if number == 0 else None))
        self.feed(TemplatesReady, job_id="job-1")
        self.fire("settle", 1.0) if self.machine.public_state()["phase"] == "WAITING" else None
        for name in names:
            self.quiesced(name, 1, report())
        self.plan()
        self.resume = self.commands()[0].command
        for name in names:
            self.resumed(name, 1)
        self.stepped("node-0", 1, 1)

    def completed(self, name: str) -> None:
        part = SnapshotCompleted(
            generation=1, step=3, vote=vote(3), size_bytes=1000, copy_s=0.05, stall_s=0.0
        )
        self.say(name, part)

    def complete_snapshot(self) -> None:
        self.begin()
        for name in ("node-0", "node-1"):
            self.say(name, Heartbeat(generation=1, committed=committed(1)))
        self.wait(0.1)
        self.stepped("node-0", 1, 2)
        for name in ("node-0", "node-1"):
            self.say(name, SnapshotStarted(generation=1, step=3))
        for name in ("node-0", "node-1"):
            self.completed(name)

    def lost(self) -> CheckRestore:
        """Let node-1 die and node-2 come; return the check that follows from the planner's answer."""
        self.feed(NodeVanished, node="node-1", incarnation=101)
        self.quiesced("node-0", 2, report(3, held=(0, 1)))
        asked: ComputePlan = self.one(ComputePlan)
        self.feed(
            PlanImpossible, generation=asked.generation, too_few=False, reason="lost", lost_layers=(2, 3)
        )
        return self.one(CheckRestore)

    def events(self, name: str) -> list[EmitEvent]:
        return [event for event in self.all(EmitEvent) if event.name == name]


def test_each_node_receives_its_replica_peer_and_the_record_names_them() -> None:
    s = Alone()
    s.complete_snapshot()
    assert isinstance(s.resume, Resume)
    assert s.resume.replica_peers == {
        "node-0": ReplicaPeer(node="node-1", address="host-node-1:7001"),
        "node-1": ReplicaPeer(node="node-0", address="host-node-0:7001"),
    }
    [published] = s.events("SnapshotCompleted")
    assert published.details["replica_peers"] == {"node-0": "node-1", "node-1": "node-0"}
    assert published.details["unprotected"] == []
    groups = s.machine.durable_state()["snapshot"]["groups"]
    assert [(list(g["owners"]), g["replica_peer"]) for g in groups] == [
        (["node-0"], "node-1"),
        (["node-1"], "node-0"),
    ]


def test_the_copy_of_a_lost_owner_counts() -> None:
    s = Alone()
    s.complete_snapshot()
    asked = s.lost()
    assert (asked.present, asked.copied) == (("node-0",), ("node-1",))
    answer = check_restore(asked, s.now)
    assert (answer.possible, answer.tier) == (True, "buddy")


def test_a_replica_peer_that_returns_reports_which_copies_it_has() -> None:
    s = Alone()
    s.complete_snapshot()
    s.feed(NodeVanished, node="node-0", incarnation=100)
    copy = HeldSnapshot(job_id="job-1", step=3, generation=1, owner="node-1")
    s.hello("node-0", 200, snapshots=(copy,))
    state = s.machine.durable_state()
    held = dict(zip(state["hosts"]["name"], state["held"], strict=True))
    own = {one["owner"] for one in held["node-0"]}
    assert own == {"node-1"}  # Its own part is not there any more.


def test_a_copy_in_memory_that_is_yet_to_be_checked_is_waited_for() -> None:
    s = Alone()
    s.complete_snapshot()
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-0", incarnation=100)
    s.note("node-0 has found its own part, and not yet the copy of node-1's")
    s.hello("node-0", 200, snapshots=(HeldSnapshot(job_id="job-1", step=3, generation=1),))
    s.say("node-0", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-0", s.machine.generation, report())
    lost = {"too_few": False, "reason": "lost", "lost_layers": (0, 1, 2, 3)}
    s.feed(PlanImpossible, generation=s.machine.generation, **lost)
    s.feed(RestoreChecked, generation=s.machine.generation, possible=False, reason="a part is missing")
    assert "node-1 and node-0 may still hold it" in s.machine.public_state()["waiting_for"]


def test_the_loss_of_an_idle_replica_peer_starts_a_new_generation() -> None:
    s = Alone()
    s.begin()
    s.hello("node-9", 900)
    s.machine._c.resumption.replica_peers["node-1"] = (
        "node-9"  # It seems to have been idle when the plan was made.
    )
    s.feed(NodeVanished, node="node-9", incarnation=900)
    sent = [one.command for one in s.commands(Quiesce)]
    assert sent and all(command.mode == "boundary" for command in sent)
