"""Effects: imperatives that come out of a machine's ``step``, to be carried out in order.

A driver carries them out: asyncio in production (``ftd``), virtual time in the simulator. The order is part
of the protocol: a ``PersistState`` that precedes a command must be durable before the command is sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.values import Plan, Situation
from statemachine.messages import trainer
from statemachine.messages.cluster import Command, Persist, Resume, RetainSnapshot, Signal, ToNode, ToNodes
from statemachine.messages.common import Quiesce
from statemachine.messages.values import (
    Job,
    LayerFile,
    NodeState,
    ProfiledJob,
    ProtectionRequest,
    ReplicaPeer,
    Snapshot,
    Vote,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    cause: str


# --- both machines -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Effect):
    """Deliver ``TimerFired(name)`` after ``delay_s``; this replaces a pending timer of that name."""

    name: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer(Effect):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent(Effect):
    """Publish an event on the MQTT event stream and log it. ``name`` is a past-tense fact, such as
    ``NodeLost``.
    """

    name: str
    reason: str
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """JSON-compatible details of the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSteps(Effect):
    """Add steps that another coordinator reported, and that nodes remember, to the coordinator's history."""

    steps: tuple[EmitEvent, ...]
    """``StepCommitted`` and ``Evaluated`` in the order of their steps; they are not published again."""


# --- the cluster machine -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand(Effect):
    node: str
    incarnation: int
    command: Command

    @property
    def message(self) -> ToNode:
        return ToNode(node=self.node, incarnation=self.incarnation, command=self.command, cause=self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastCommand(Effect):
    """Send the same command to several nodes as one message: either all of them are sent it, or none is.

    The broker does not order it relative to what ``SendCommand`` sends to one of them.
    """

    receivers: Mapping[str, int]
    """Name of each addressed node → its incarnation."""
    command: Command

    @property
    def message(self) -> ToNodes:
        return ToNodes(receivers=self.receivers, command=self.command, cause=self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistState(Effect):
    """Make ``ClusterMachine.durable_state()`` durable before going on to the next effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCluster(Effect):
    """Publish ``ClusterMachine.public_state()`` as a retained message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNode(Effect):
    """Delete what the broker retains about a node that was removed."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTemplates(Effect):
    """Precompute templates and instantiations for up to ``max_nodes``; answered by TemplatesReady or
    TemplatesFailed.

    TemplatesReady may come while the rest, for numbers of nodes that are less likely than ``present``, is
    still computed.
    """

    profiled: ProfiledJob
    max_nodes: int
    present: int
    """Number of nodes that are present, which is the likeliest number to plan for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTemplates(Effect):
    """Stop precomputing for ``BuildTemplates``, because the job is over."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan(Effect):
    """Compute a plan for ``generation``; answered by PlanReady or PlanImpossible of the same generation."""

    generation: int
    situation: Situation
    protection: ProtectionRequest | None = None
    """Requested protection of its snapshots; PlanReady has the one that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAhead(Effect):
    """Compute a plan in advance, while the nodes that are left report what they hold after a loss.

    The plan is for what they will likely report, so that ComputePlan can be answered at once. This effect
    has no answer.
    """

    devices: Mapping[str, int]
    """Nodes that are left, each with its number of devices."""
    previous: Plan
    """The plan that determines which layers they will likely report."""
    speeds: dict[str, float]
    horizon_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan(Effect):
    """Compute what a new plan would save while ``generation`` continues to train; answered by PlanCompared."""

    generation: int
    situation: Situation
    """Situation with the current plan as ``previous``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDrain(Effect):
    """Check whether there is a plan without these nodes while ``generation`` continues to train; answered by
    DrainChecked.
    """

    generation: int
    nodes: tuple[str, ...]
    situation: Situation
    """Situation of all other nodes, with the current plan as ``previous``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRestore(Effect):
    """Check whether this snapshot can be restored from these nodes' shards; answered by RestoreChecked."""

    generation: int
    record: Snapshot
    present: tuple[str, ...]
    """Nodes that are present and hold their part."""
    copied: tuple[str, ...] = ()
    """Nodes whose part a present replica peer holds as a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint(Effect):
    """Write the manifest of a checkpoint whose layers are all on the disk, then remove old checkpoints.

    Answered by CheckpointCommitted or CheckpointCommitFailed.
    """

    job: Job
    attempt: str
    step: int
    vote: Vote
    layers: tuple[LayerFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonCheckpoint(Effect):
    """Remove what was written for an abandoned attempt, unless it was committed in the meantime."""

    job: Job
    attempt: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheckpoint(Effect):
    """Export a complete checkpoint for ``from_pretrained``; answered by ExportCompleted or ExportFailed."""

    job: Job
    step: int
    limit_s: float
    """Time after which the export is abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint(Effect):
    """Find the newest complete checkpoint of this job; answered by CheckpointFound."""

    generation: int
    job: Job
    corrupt_steps: tuple[int, ...]
    """Steps whose checkpoints turned out to be corrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest(Effect):
    """Answer a client's request (submit, stop, drain, snapshot)."""

    request: str
    accepted: bool
    detail: str
    outcome: str = ""
    """Consequence of an accepted request to drain a node: ``leaving``, ``waiting``, ``released`` or
    ``cancelled``; of one to take a snapshot now: ``complete`` or ``under way``.
    """


# --- the agent machine -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSignal(Effect):
    """Send a signal to the coordinator. It is dropped while the broker is away: Hello reports the state again."""

    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishNode(Effect):
    """Publish the node's retained state for outside tools."""

    state: NodeState
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrainer(Effect):
    """Fork a trainer for ``device``; TrainerConnected or TrainerFailed follows later."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTrainer(Effect):
    """End the trainer's whole process group: SIGTERM, and SIGKILL after ``grace_s`` (0: SIGKILL at once).

    No TrainerFailed follows for a process that was ended this way.
    """

    device: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTrainer(Effect):
    device: int
    job: Job
    profile: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructTrainer(Effect):
    """Send this instruction to the trainer of ``device``."""

    device: int
    instruction: Quiesce | trainer.StartSnapshot | trainer.RetainLocalSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer(Effect):
    """Send this ``Resume`` to the trainer of ``device``; with a ``restore``, after its layers are staged.

    StagingFailed follows instead if they cannot be reconstructed.
    """

    device: int
    resume: Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistLayers(Effect):
    """Write these layers as files of a checkpoint, in the background; answered by PersistEnded."""

    order: Persist


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPersisting(Effect):
    """Stop what ``PersistLayers`` began, if it is still under way; no answer is needed."""

    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSnapshotCopy(Effect):
    """Send this node's part of a snapshot to its replica peer; answered by SnapshotCopyCommitted or
    SnapshotCopyFailed.

    A newer order replaces one that is under way.
    """

    job_id: str
    step: int
    generation: int
    replica_peer: ReplicaPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainSnapshotCopies(Effect):
    """Retain the snapshot of ``order.step``, which is complete everywhere.

    Copies of older snapshots may be overwritten, and what this node holds of this one is verified and
    repaired from now on.
    """

    order: RetainSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSnapshots(Effect):
    """Free what the node's memory holds of the job's snapshots, since the job is over."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHealthCheck(Effect):
    """Test every device, and the links to these peers; answered by ``HealthCheckEnded``. It ends the check
    under way.
    """

    number: int
    peers: tuple[ReplicaPeer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHealthCheck(Effect):
    """End the health check under way, without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewIncarnation(Effect):
    """Reconnect to the broker as a new incarnation after a fence, and feed ``AgentStarted`` again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitDaemon(Effect):
    code: int
