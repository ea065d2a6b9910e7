"""Scripts of nodes that write a checkpoint."""

from collections.abc import Callable
from typing import Any

from planner.errors import StateLostError
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots.persisting import attempt_of
from statemachine.effects import (
    CommitCheckpoint,
    ComputePlan,
    EmitEvent,
)
from statemachine.events import (
    BrokerConnected,
    CheckpointCommitted,
    NodeVanished,
    PlanImpossible,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import (
    Heartbeat,
    LayersPersisted,
    Persist,
    SnapshotCompleted,
)
from statemachine.messages.common import Finished, Prepared
from statemachine.messages.values import (
    CheckpointPolicy,
    CheckpointRecord,
    Job,
    LayerFile,
    Snapshot,
    SnapshotGroup,
    SnapshotPolicy,
)
from tests.helpers.transcripts import (
    PROFILE,
    Coordination,
    committed,
    job,
    report,
    vote,
)

NODES = ("node-0", "node-1", "node-2", "node-3")


GROUPS = (
    SnapshotGroup(first_layer=0, end_layer=2, owners=("node-0", "node-2"), protection="aec"),
    SnapshotGroup(first_layer=2, end_layer=4, owners=("node-1", "node-3"), protection="aec"),
)


def writing_job(steps: int = 40, every_steps: int = 4, *, auto_interval: bool = False) -> Job:
    plain = job(steps=steps, snapshot=SnapshotPolicy(every_steps=2, protection="aec"))
    policy = CheckpointPolicy(url="/checkpoints", every_steps=every_steps, auto_interval=auto_interval)
    return Job(
        job_id=plain.job_id,
        name=plain.name,
        steps=steps,
        policy=plain.policy,
        snapshot=plain.snapshot,
        checkpoint=policy,
    )


def on_disk(layers: tuple[int, ...]) -> tuple[LayerFile, ...]:
    return tuple(
        LayerFile(
            layer=layer,
            name=f"layer-{layer:04d}.bin",
            size_bytes=10,
            digest="d",
            header_bytes=2,
            header_digest="h",
            payload_bytes=8,
        )
        for layer in layers
    )


class Writing(Coordination):
    """Four nodes in two pipelines of two stages; a snapshot is written as a checkpoint every fourth step."""

    def begin(self, steps: int = 40, begin: CheckpointRecord | None = None, **policy: Any) -> None:
        self.feed(BrokerConnected)
        for number, name in enumerate(NODES):
            self.hello(name, 100 + number)
        self.feed(SubmitRequested, request="r", job=writing_job(steps, **policy), start_checkpoint=begin)
        for number, name in enumerate(NODES):
            self.say(name, Prepared(job_id="job-1", profile=PROFILE if number == 0 else None))
        self.feed(TemplatesReady, job_id="job-1")
        for name in NODES:
            self.quiesced(name, 1, report())

    def train(self, steps: int = 40, **policy: Any) -> None:
        self.begin(steps, **policy)
        self.plan()
        for name in NODES:
            self.resumed(name, 1)

    def snapshot(self, step: int) -> list[Any]:
        """Complete a snapshot of this step everywhere; return the effects of that."""
        self.wait(1.0)
        machine: ClusterMachine = self.machine
        kept = machine.cluster.snapshots.newest.step if machine.cluster.snapshots.newest is not None else 0
        self.stepped("node-0", 1, *range(1, step))
        for name in NODES:
            self.say(name, Heartbeat(generation=1, committed=committed(step - 1), retained_step=kept))
        for name in NODES:
            self.complete(name, step)
        return self.last

    def complete(self, name: str, step: int) -> None:
        completed = SnapshotCompleted(
            generation=1, step=step, vote=vote(step), size_bytes=100, copy_s=0.1, stall_s=0.0
        )
        self.say(name, completed)

    def orders(self) -> dict[str, Persist]:
        return {sent.node: sent.command for sent in self.commands(Persist)}

    def events(self, name: str) -> list[EmitEvent]:
        return [event for event in self.all(EmitEvent) if event.name == name]

    def wrote(self, order: Persist, node: str) -> None:
        self.say(
            node,
            LayersPersisted(
                job_id=order.job_id,
                attempt=order.attempt,
                step=order.record.step,
                layers=on_disk(order.layers),
                took_s=1.0,
            ),
        )

    def written(self, step: int) -> CommitCheckpoint:
        """Let all nodes write the snapshot of this step, and commit it."""
        self.snapshot(step)
        for node, order in self.orders().items():
            self.wrote(order, node)
        commit: CommitCheckpoint = self.one(CommitCheckpoint)
        self.feed(CheckpointCommitted, attempt=commit.attempt, step=step, pruned=())
        return commit

    def plan_or_not(self) -> None:
        asked: ComputePlan = self.one(ComputePlan)
        try:
            self.plan()
        except StateLostError as error:
            lost = {"too_few": False, "reason": str(error), "lost_layers": error.layers}
            self.feed(PlanImpossible, generation=asked.generation, **lost)


def all_done(s: Writing, steps: int) -> None:
    s.stepped("node-0", 1, *range(1, steps + 1))
    for name in NODES:
        s.say(
            name,
            Heartbeat(
                generation=1,
                committed=committed(steps),
                retained_step=s.machine.cluster.snapshots.newest.step,
            ),
        )
    for name in NODES:
        s.say(name, Finished(generation=1, step=steps, digests={}))


def gone(s: Writing, before: Callable[[], Any] = lambda: None) -> None:
    """Lose everything that any node's memory held; new nodes of the same names are ready."""
    s.train()
    s.written(5)
    before()
    for number, name in enumerate(NODES):
        s.feed(NodeVanished, node=name, incarnation=100 + number)
    for number, name in enumerate(NODES):
        s.hello(name, 200 + number)
        s.say(name, Prepared(job_id="job-1", profile=None))
    s.fire("join", after_s=0.2)


def persist_order(step: int = 5) -> Persist:
    record = Snapshot(step=step, generation=1, vote=vote(step), groups=GROUPS)
    return Persist(
        job_id="job-1",
        job_name="tiny",
        url="/checkpoints",
        attempt=attempt_of(job(), record),
        record=record,
        layers=(0, 1),
        sources={},
    )
