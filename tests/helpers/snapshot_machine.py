"""Scripts that drive the snapshot rules of the cluster machine."""

from typing import Any

from ftd.coordinator.restore_check import check_restore
from planner.errors import StateLostError
from statemachine.effects import CheckRestore, ComputePlan, EmitEvent
from statemachine.events import (
    BrokerConnected,
    NodeVanished,
    PlanImpossible,
    RestoreChecked,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import (
    Heartbeat,
    SnapshotCompleted,
)
from statemachine.messages.common import Prepared, SnapshotStarted
from statemachine.messages.values import HeldSnapshot, SnapshotPolicy, UpdatePolicy
from tests.helpers.transcripts import PROFILE, Coordination, committed, job, report, vote

KEY = HeldSnapshot(job_id="job-1", step=3, generation=1)


HELD = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1), "node-3": (2, 3)}


class Snapshots(Coordination):
    """Four nodes in two pipelines of two stages, with a snapshot after every second step."""

    def begin(
        self,
        protection: str = "aec",
        updates: UpdatePolicy = UpdatePolicy(),  # noqa: B008
        **policy: Any,
    ) -> None:
        self.feed(BrokerConnected)
        for number, name in enumerate(HELD):
            self.hello(name, 100 + number)
        snapshot = SnapshotPolicy(**{"every_steps": 2, "protection": protection} | policy)
        self.feed(SubmitRequested, request="r", job=job(steps=40, snapshot=snapshot, updates=updates))
        for number, name in enumerate(HELD):
            self.say(name, Prepared(job_id="job-1", profile=PROFILE if number == 0 else None))
        self.feed(TemplatesReady, job_id="job-1")
        for name in HELD:
            self.quiesced(name, 1, report())
        self.plan()
        for name in HELD:
            self.resumed(name, 1)
        self.stepped("node-0", 1, 1)
        self.lines.clear()

    def heartbeat(self, node: str, retained_step: int = 0, **says: Any) -> None:
        self.say(node, Heartbeat(generation=1, committed=committed(1), retained_step=retained_step, **says))

    def look(self) -> None:
        self.machine._c.due["tick"] = self.now
        self.fire("tick")

    def ordered(self) -> None:
        """Commit steps 1 and 2 with heartbeats of all nodes, so that a snapshot is ordered."""
        for name in HELD:
            self.heartbeat(name)
        self.wait(0.1)
        self.stepped("node-0", 1, 2)

    def completed(self, *nodes: str, generation: int = 1, step: int = 3) -> None:
        for name in nodes:
            self.say(
                name,
                SnapshotCompleted(
                    generation=generation,
                    step=step,
                    vote=vote(step),
                    size_bytes=1000,
                    copy_s=0.05,
                    stall_s=0.0,
                ),
            )

    def complete_snapshot(self, **begin: Any) -> None:
        """Complete the snapshot of step 3 everywhere."""
        self.begin(**begin)
        self.ordered()
        for name in HELD:
            self.say(name, SnapshotStarted(generation=1, step=3))
        self.completed(*HELD)
        self.stepped("node-0", 1, 3, 4, 5)
        self.lines.clear()

    def plan_or_not(self) -> None:
        """Send the planner's answer to the ComputePlan among the last effects."""
        asked: ComputePlan = self.one(ComputePlan)
        try:
            self.plan()
        except StateLostError as error:
            self.feed(
                PlanImpossible,
                generation=asked.generation,
                too_few=False,
                reason=str(error),
                lost_layers=error.layers,
            )

    def check(self) -> None:
        """Send the coordinator's answer to the CheckRestore among the last effects."""
        answer = check_restore(self.one(CheckRestore), self.now)
        self.feed(
            RestoreChecked,
            generation=answer.generation,
            possible=answer.possible,
            reason=answer.reason,
            tier=answer.tier,
        )

    def both_hosts_die(self) -> None:
        """Lose both hosts of layers 2 and 3, the second one while a plan is computed; the survivors are at
        step 5.
        """
        self.feed(NodeVanished, node="node-1", incarnation=101)
        for name in ("node-0", "node-2", "node-3"):
            self.quiesced(name, 2, report(5, held=HELD[name]))
        self.feed(NodeVanished, node="node-3", incarnation=103)

    def wait_for_both_hosts(self) -> None:
        """Lose both hosts of layers 2 and 3 after a snapshot, so that the job waits for what they hold of it."""
        self.complete_snapshot()
        self.both_hosts_die()
        self.survivors(3)
        self.plan_or_not()
        self.check()

    def survivors(self, generation: int, **says: Any) -> None:
        for name in ("node-0", "node-2"):
            self.quiesced(name, generation, report(5, held=HELD[name], **says))

    def events(self, name: str) -> list[EmitEvent]:
        return [event for event in self.all(EmitEvent) if event.name == name]
