"""Effects: imperatives that come out of a machine's ``step``, to be carried out in order.

A driver carries them out: asyncio in production (``ftd``), virtual time in the simulator. The order is part
of the protocol: a ``PersistState`` that precedes a command must be durable before the command is sent.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from planner.values import Plan, Situation
from statemachine.messages import trainer
from statemachine.messages.cluster import Command, Persist, Resume, RetainSnapshot, Signal, ToNode
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


class Effect(Struct, frozen=True, kw_only=True):
    cause: str


# --- both machines -----------------------------------------------------------------------------


class SetTimer(Effect, frozen=True, kw_only=True):
    """Deliver ``TimerFired(name)`` after ``delay_s``; this replaces a pending timer of that name."""

    name: str
    delay_s: float


class CancelTimer(Effect, frozen=True, kw_only=True):
    name: str


class EmitEvent(Effect, frozen=True, kw_only=True):
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


REPEATABLE = frozenset({"MessageIgnored", "MessageRejected", "PeerSuspected", "NodeRejected"})
"""Events about messages that may be repeated again and again; they are published at a limited rate and not
stored.
"""


class RecordSteps(Effect, frozen=True, kw_only=True):
    """Add steps that another coordinator reported, and that nodes remember, to the coordinator's history."""

    steps: tuple[EmitEvent, ...]
    """``StepCommitted`` and ``Evaluated`` in the order of their steps; they are not published again."""


# --- the cluster machine -----------------------------------------------------------------------


class SendCommand(Effect, frozen=True, kw_only=True):
    """Send a command to one node."""

    node: str
    incarnation: int
    command: Command

    @property
    def message(self) -> ToNode:
        return ToNode(node=self.node, incarnation=self.incarnation, command=self.command, cause=self.cause)


class BroadcastCommand(Effect, frozen=True, kw_only=True):
    """Send the same command to several nodes as one message: either all of them are sent it, or none is.

    The broker does not order it relative to what ``SendCommand`` sends to one of them.
    """

    receivers: Mapping[str, int]
    """Name of each addressed node → its incarnation."""
    command: Command


class PersistState(Effect, frozen=True, kw_only=True):
    """Make ``ClusterMachine.durable_state()`` durable before going on to the next effect."""


class PublishCluster(Effect, frozen=True, kw_only=True):
    """Publish ``ClusterMachine.public_state()`` as a retained message."""


class RemoveNode(Effect, frozen=True, kw_only=True):
    """Delete what the broker retains about a node that was removed."""

    node: str


class BuildTemplates(Effect, frozen=True, kw_only=True):
    """Precompute templates and instantiations for up to ``max_nodes``; answered by TemplatesReady or
    TemplatesFailed.

    TemplatesReady may come while the rest, for numbers of nodes that are less likely than ``present``, is
    still computed.
    """

    profiled: ProfiledJob
    max_nodes: int
    present: int
    """Number of nodes that are present, which is the likeliest number to plan for."""


class CancelTemplates(Effect, frozen=True, kw_only=True):
    """Stop precomputing for ``BuildTemplates``, because the job is over."""

    job_id: str


class ComputePlan(Effect, frozen=True, kw_only=True):
    """Compute a plan for ``generation``; answered by PlanReady or PlanImpossible of the same generation."""

    generation: int
    situation: Situation
    protection: ProtectionRequest | None = None
    """Requested protection of its snapshots; PlanReady has the one that was chosen."""


class PlanAhead(Effect, frozen=True, kw_only=True):
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


class ComparePlan(Effect, frozen=True, kw_only=True):
    """Compute what a new plan would save while ``generation`` continues to train; answered by PlanCompared."""

    generation: int
    situation: Situation
    """Situation with the current plan as ``previous``."""


class CheckDrain(Effect, frozen=True, kw_only=True):
    """Check whether there is a plan without these nodes while ``generation`` continues to train; answered by
    DrainChecked.
    """

    generation: int
    nodes: tuple[str, ...]
    situation: Situation
    """Situation of all other nodes, with the current plan as ``previous``."""


class CheckRestore(Effect, frozen=True, kw_only=True):
    """Check whether this snapshot can be restored from these nodes' shards; answered by RestoreChecked."""

    generation: int
    record: Snapshot
    present: tuple[str, ...]
    """Nodes that are present and hold their part."""
    copied: tuple[str, ...] = ()
    """Nodes whose part a present replica peer holds as a copy."""


class CommitCheckpoint(Effect, frozen=True, kw_only=True):
    """Write the manifest of a checkpoint whose layers are all on the disk, then remove old checkpoints.

    Answered by CheckpointCommitted or CheckpointCommitFailed.
    """

    job: Job
    attempt: str
    step: int
    vote: Vote
    layers: tuple[LayerFile, ...]


class AbandonCheckpoint(Effect, frozen=True, kw_only=True):
    """Remove what was written for an abandoned attempt, unless it was committed in the meantime."""

    job: Job
    attempt: str
    step: int


class ExportCheckpoint(Effect, frozen=True, kw_only=True):
    """Export a complete checkpoint for ``from_pretrained``; answered by ExportCompleted or ExportFailed."""

    job: Job
    step: int
    limit_s: float
    """Time after which the export is abandoned."""


class FindCheckpoint(Effect, frozen=True, kw_only=True):
    """Find the newest complete checkpoint of this job; answered by CheckpointFound."""

    generation: int
    job: Job
    corrupt_steps: tuple[int, ...]
    """Steps whose checkpoints turned out to be corrupt."""


class AnswerRequest(Effect, frozen=True, kw_only=True):
    """Answer a client's request (submit, stop, drain, snapshot)."""

    request: str
    accepted: bool
    detail: str
    outcome: str = ""
    """Consequence of an accepted request to drain a node: ``leaving``, ``waiting``, ``released`` or
    ``cancelled``; of one to take a snapshot now: ``complete`` or ``under way``.
    """


# --- the agent machine -------------------------------------------------------------------------


class SendSignal(Effect, frozen=True, kw_only=True):
    """Send a signal to the coordinator. It is dropped while the broker is away: Hello reports the state again."""

    signal: Signal


class PublishNode(Effect, frozen=True, kw_only=True):
    """Publish the node's retained state for outside tools."""

    state: NodeState
    generation: int
    step: int
    reason: str


class StartTrainer(Effect, frozen=True, kw_only=True):
    """Fork a trainer for ``device``; TrainerConnected or TrainerFailed follows later."""

    device: int


class KillTrainer(Effect, frozen=True, kw_only=True):
    """End the trainer's whole process group: SIGTERM, and SIGKILL after ``grace_s`` (0: SIGKILL at once).

    No TrainerFailed follows for a process that was ended this way.
    """

    device: int
    grace_s: float


class PrepareTrainer(Effect, frozen=True, kw_only=True):
    device: int
    job: Job
    profile: bool


class InstructTrainer(Effect, frozen=True, kw_only=True):
    """Send this instruction to the trainer of ``device``."""

    device: int
    instruction: Quiesce | trainer.StartSnapshot | trainer.RetainLocalSnapshot


class ResumeTrainer(Effect, frozen=True, kw_only=True):
    """Send this ``Resume`` to the trainer of ``device``; with a ``restore``, after its layers are staged.

    StagingFailed follows instead if they cannot be reconstructed.
    """

    device: int
    resume: Resume


class PersistLayers(Effect, frozen=True, kw_only=True):
    """Write these layers as files of a checkpoint, in the background; answered by PersistEnded."""

    order: Persist


class StopPersisting(Effect, frozen=True, kw_only=True):
    """Stop what ``PersistLayers`` began, if it is still under way; no answer is needed."""

    attempt: str


class SendSnapshotCopy(Effect, frozen=True, kw_only=True):
    """Send this node's part of a snapshot to its replica peer; answered by SnapshotCopyCommitted or
    SnapshotCopyFailed.

    A newer order replaces one that is under way.
    """

    job_id: str
    step: int
    generation: int
    replica_peer: ReplicaPeer


class RetainSnapshotCopies(Effect, frozen=True, kw_only=True):
    """Retain the snapshot of ``order.step``, which is complete everywhere.

    Copies of older snapshots may be overwritten, and what this node holds of this one is verified and
    repaired from now on.
    """

    order: RetainSnapshot


class RemoveSnapshots(Effect, frozen=True, kw_only=True):
    """Free what the node's memory holds of the job's snapshots, since the job is over."""

    job_id: str


class RunHealthCheck(Effect, frozen=True, kw_only=True):
    """Test every device, and the links to these peers; answered by ``HealthCheckEnded``. It ends the check
    under way.
    """

    number: int
    peers: tuple[ReplicaPeer, ...]


class StopHealthCheck(Effect, frozen=True, kw_only=True):
    """End the health check under way, without an answer."""


class RenewIncarnation(Effect, frozen=True, kw_only=True):
    """Reconnect to the broker as a new incarnation after a fence, and feed ``AgentStarted`` again."""


class ExitDaemon(Effect, frozen=True, kw_only=True):
    code: int
