"""Effects: imperatives that come out of a machine's ``step``, to be carried out in order.

A driver interprets them: asyncio in production (``ftd``), the virtual world in the simulator. The order
is part of the protocol: a ``PersistState`` that precedes a command must be durable before it.
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
    """Deliver ``TimerFired(name)`` after ``delay_s``; a pending timer of that name is replaced."""

    name: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer(Effect):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent(Effect):
    """Tell the world (MQTT event stream, log). ``name`` is a past-tense fact: ``NodeLost``."""

    name: str
    reason: str
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """JSON-compatible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSteps(Effect):
    """Put steps that another coordinator reported, and that nodes remember, into the coordinator's history."""

    steps: tuple[EmitEvent, ...]
    """``StepCommitted`` and ``Evaluated``, in order of their steps; they are not published again."""


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
    """The same command to several nodes, as one message: all of them are sent it, or none is.

    Between it and what ``SendCommand`` says to one of them there is no order on the way.
    """

    receivers: Mapping[str, int]
    """Name → incarnation."""
    command: Command

    @property
    def message(self) -> ToNodes:
        return ToNodes(receivers=self.receivers, command=self.command, cause=self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistState(Effect):
    """Make ``ClusterMachine.durable_state()`` durable before going on to the next effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCluster(Effect):
    """Publish ``ClusterMachine.public_state()``, retained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNode(Effect):
    """Delete what the broker retains of a node that is gone."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTemplates(Effect):
    """Precompute templates and instantiations for up to ``max_nodes``: TemplatesReady / TemplatesFailed.

    TemplatesReady may come while the rest, for less likely numbers of nodes than ``present``, is still made.
    """

    profiled: ProfiledJob
    max_nodes: int
    present: int
    """Nodes that are here: the likeliest number to plan for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTemplates(Effect):
    """The job is over: nobody needs what ``BuildTemplates`` has yet to precompute for it."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan(Effect):
    """Plan for ``generation``: answered by PlanReady or PlanImpossible of the same generation."""

    generation: int
    situation: Situation
    protection: ProtectionRequest | None = None
    """Of its snapshots; PlanReady says what they get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAhead(Effect):
    """Nodes were lost, and the others are asked what they hold: plan for what they will likely say, so that
    ComputePlan is answered at once. Nothing is answered to this."""

    devices: Mapping[str, int]
    """Nodes that are left, each with its number of devices."""
    previous: Plan
    """By which they will say that they hold their layers."""
    speeds: dict[str, float]
    horizon_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan(Effect):
    """What would a new plan save? ``generation`` trains on meanwhile; answered by PlanCompared."""

    generation: int
    situation: Situation
    """With the plan under way as ``previous``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRestore(Effect):
    """Can this snapshot be put together from these nodes' shards? Answered by RestoreChecked."""

    generation: int
    record: Snapshot
    present: tuple[str, ...]
    """Nodes that are here and hold their part."""
    copied: tuple[str, ...] = ()
    """Nodes of whose part a buddy that is here holds a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint(Effect):
    """All layers are on the disk: write the manifest, then prune. CheckpointCommitted or CheckpointCommitFailed."""

    job: Job
    attempt: str
    step: int
    vote: Vote
    layers: tuple[LayerFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonCheckpoint(Effect):
    """Remove what was written of an attempt that was given up, unless it was committed after all."""

    job: Job
    attempt: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheckpoint(Effect):
    """Export a complete checkpoint for ``from_pretrained``. CheckpointExported or CheckpointExportFailed."""

    job: Job
    step: int
    limit_s: float
    """Give up after this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint(Effect):
    """The newest complete checkpoint of this job: CheckpointFound."""

    generation: int
    job: Job
    corrupt_steps: tuple[int, ...]
    """Steps whose checkpoints turned out to be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest(Effect):
    """Answer a client's request (submit, stop, drain)."""

    request: str
    accepted: bool
    detail: str


# --- the agent machine -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSignal(Effect):
    """Send to the coordinator. Dropped while the broker is away: Hello says the state again."""

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
    """Fork a trainer for ``device``: later TrainerConnected, or TrainerFailed."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTrainer(Effect):
    """End the trainer's whole process group: SIGTERM, and SIGKILL after ``grace_s`` (0: SIGKILL at once).

    No TrainerFailed follows for a process ended this way.
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
    """Hand this ``Resume`` to the trainer of ``device``; with a ``restore``, once its layers are staged.

    Instead of it: StagingFailed, where they cannot be put together.
    """

    device: int
    resume: Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistLayers(Effect):
    """Write these layers as files of a checkpoint, in the background: PersistEnded."""

    order: Persist


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPersisting(Effect):
    """End what ``PersistLayers`` began, if it is still at it; nobody waits for its answer."""

    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSnapshotCopy(Effect):
    """Send this node's part of a snapshot to its buddy: SnapshotCopyCommitted or SnapshotCopyFailed. The
    last one counts."""

    job_id: str
    step: int
    generation: int
    replica_peer: ReplicaPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainSnapshotCopies(Effect):
    """The snapshot of ``order.step`` is complete everywhere: copies of older ones may be written over, and what is
    here of it is verified and repaired from now on."""

    order: RetainSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSnapshots(Effect):
    """The job is over for good: free what the node's memory holds of it."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewIncarnation(Effect):
    """Fenced: reconnect to the broker as a new incarnation and feed ``AgentStarted`` again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitDaemon(Effect):
    code: int
