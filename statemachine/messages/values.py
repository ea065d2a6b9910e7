"""The vocabulary that messages, events and effects share: plain immutable values.

Three numbers fence stale messages (design: "Fencing"): a node's *incarnation* (an integer, new at each
start of its daemon), the *generation* of the plan (one per reconfiguration, never reused), the *step*.
Times named ``at`` are seconds on one monotonic clock; durations end in ``_s``.
"""

from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct

from planner.values import Device, ModelProfile, Policy, StatePart
from storage.values import LayerFile as LayerFile  # noqa: PLC0414 (It is a word of this vocabulary, too.)


class NodeState(StrEnum):
    """REFT §4.4."""

    HEALTHY = "HEALTHY"
    SNAP = "SNAP"
    COMPLETED = "COMPLETED"
    UNHEALTHY = "UNHEALTHY"
    OFFLINE = "OFFLINE"


class ClusterPhase(StrEnum):
    WAITING = "WAITING"
    """No job, or a job whose first plan is not running yet."""
    RUNNING = "RUNNING"
    QUIESCING = "QUIESCING"
    """A new generation is announced; reports of (step, phase, holdings) are coming in."""
    RECOVERING = "RECOVERING"
    """A plan is being made, or survivors rendezvous and move state under it."""
    PAUSED = "PAUSED"
    """Too few nodes. Survivors hold their state and wait."""
    FINISHED = "FINISHED"
    FAILED = "FAILED"


class NodeActivity(StrEnum):
    """What the trainers of a node do, as its heartbeats report it."""

    NONE = "NONE"
    """The node has no job."""
    BUILDING = "BUILDING"
    """At least one trainer is starting or building the job."""
    PREPARED = "PREPARED"
    """All trainers have built the job and have not taken part in a generation since."""
    QUIESCING = "QUIESCING"
    QUIESCED = "QUIESCED"
    """All trainers have stopped and reported, and wait for a Resume."""
    RESUMING = "RESUMING"
    TRAINING = "TRAINING"
    FINISHED = "FINISHED"
    """All trainers with a rank have finished the last step."""
    IDLE = "IDLE"
    """Resumed under a plan that has no rank for this node."""


FailureCause = Literal["exited", "raised", "hung", "unprepared", "foreign"]
"""Of a trainer: its process ended; its code raised; it made no progress; it could not build the job; the
state that it was to go on from is of another model."""

QuiesceMode = Literal["abort", "boundary"]
"""Stop at once and unwind; or stop together behind the step in flight (joins, drains)."""


MAX_METRICS = 32
"""Own metrics of a training function that one step may have."""
MAX_METRIC_NAME_CHARACTERS = 64
"""In the name of one of them."""


class Evaluation(Struct, frozen=True, kw_only=True):
    """What the held-out data set says of the state after one committed step."""

    loss: float
    """Mean over the held-out samples: the sum of the loss's terms over ``weight``; NaN where that is 0."""
    weight: float
    """Total weight of the loss: rows, or the tokens that count."""
    metrics: dict[str, float] = {}
    """Own metrics of the training function, averaged over the held-out samples."""
    took_s: float


class Vote(Struct, frozen=True, kw_only=True):
    """What every rank knows about one step once it has passed the VOTE (design §4).

    A survivor that rolls forward applies the step from this alone, so whatever the update depends on is here.
    """

    loss: float
    """Mean loss over the global batch: the sum of the loss's terms over ``weight``."""
    gradient_norm: float
    """Before clipping, of the mean loss (not scaled)."""
    skipped: bool = False
    """The step commits without an update: a gradient was not finite, as with AMP, or ``weight`` is 0."""
    weight: float = 1.0
    """Total weight of the global batch's loss: rows, or the tokens that count."""
    loss_scale: float = 1.0
    """float16: the factor by which the loss, and so every gradient, was multiplied in this step."""
    learning_rate: float = 0.0
    """Used for this step, of the optimizer's first parameter group; 0 where it is unknown."""
    metrics: dict[str, float] = {}
    """Own metrics of the training function, averaged over the global batch like the loss."""
    evaluation: Evaluation | None = None
    """Of the state before this step, if the group evaluated it: no rank gets to this VOTE without its result."""


class SnapshotPolicy(Struct, frozen=True, kw_only=True):
    """In-memory checkpoints of a job (design §7)."""

    every_steps: int = 0
    """A snapshot behind every so many steps; 0: none."""
    protection: str = "none"
    """What a group of owners withstands: a scheme of ``storage.codes``."""
    auto_interval: bool = False
    """``every_steps`` is where to begin; then it follows from what is measured (``intervals``)."""
    cheap_share: float = 0.01
    """Of a step: automatically, a snapshot that costs no more is taken behind every step."""
    paused: bool = False
    """None is taken for now, unless it is asked for."""
    auto_protection: bool = False
    """``protection`` is what was chosen last; every plan chooses anew."""


class CheckpointPolicy(Struct, frozen=True, kw_only=True):
    """Persistent checkpoints of a job. A job file's paths are relative to it, a job's are absolute."""

    url: str = ""
    """A directory, relative to the job file, or a URL of fsspec, that the coordinator and all nodes reach."""
    every_steps: int = 0
    """The first snapshot so many steps after the last checkpoint becomes one."""
    keep: int = 3
    """Complete checkpoints that stay; older ones are removed."""
    resume: bool = True
    """Go on from the newest one there; false: refuse to begin where there are some."""
    huggingface_every_steps: int = 0
    """The first checkpoint so many steps after the last one exported is exported for from_pretrained, too."""
    huggingface_directory: str = ""
    """A directory, relative to the job file, that every coordinator reaches, for these exports."""


class WandbPolicy(Struct, frozen=True, kw_only=True):
    """Run of Weights & Biases that a job is logged to."""

    project: str = ""
    """Project of the run; left out: the job's name."""
    entity: str = ""
    """User or team that owns the project; left out: the one of ``WANDB_API_KEY``."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes files below ``directory``, for ``wandb sync``."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class MlflowPolicy(Struct, frozen=True, kw_only=True):
    """Experiment of MLflow that a job is logged to."""

    tracking_uri: str = ""
    """URL of a server, or a directory, relative to the job file; left out: ``mlruns`` below ``directory``."""
    experiment: str = ""
    """Experiment that the run belongs to; left out: the job's name."""


class LoggingPolicy(Struct, frozen=True, kw_only=True):
    """Where the leading coordinator logs the committed steps of a job, besides its journal.

    A job file's paths are relative to it, a job's are absolute; without ``directory`` a job logs nothing.
    """

    directory: str = ""
    """Directory of ``<job id>/steps.jsonl``, relative to the job file, which all coordinators' hosts share; left
    out: ``tensorboard``'s directory, or ``logs`` if another sink is named."""
    tensorboard: str = ""
    """Directory of event files, relative to the job file; each job has a run below it."""
    wandb: WandbPolicy | None = None
    mlflow: MlflowPolicy | None = None


class ProtectionRequest(Struct, frozen=True, kw_only=True):
    """What a plan is asked to protect its snapshots with."""

    scheme: str | None
    """``None``: the cheapest that withstands ``losses``."""
    losses: int
    zero1: bool = False
    limits: dict[str, int] = {}
    """Bytes that snapshots may take, of each node that said so."""


class ProtectionChoice(Struct, frozen=True, kw_only=True):
    scheme: str
    reason: str
    fallback: bool = False
    """What was wished for is not to be had with this plan's owners."""


class Job(Struct, frozen=True, kw_only=True):
    """A submitted job. ``training`` is plain data for the runtime, opaque here."""

    job_id: str
    name: str
    steps: int
    policy: Policy
    training: dict[str, Any] = {}
    horizon_s: float | None = None
    """Expected time to the next failure, where the user knows; ``None``: learned (``horizon``)."""
    snapshot: SnapshotPolicy = SnapshotPolicy()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    logging: LoggingPolicy = LoggingPolicy()


class HeldPart(Struct, frozen=True, kw_only=True):
    """What a device of the new plan has at the resume step, under ZeRO-1: the range of ``StatePart`` of
    each of the layers ``[first_layer, end_layer)``."""

    device: Device
    first_layer: int
    end_layer: int
    start: int
    end: int
    of: int
    replica: bool
    whole: bool
    """It holds all parameters and buffers of these layers besides."""


class TrainerState(Struct, frozen=True, kw_only=True):
    """State of a trainer that has quiesced."""

    committed_step: int
    """The last step that it applied."""
    ready_step: int | None
    """``committed_step + 1`` if it holds the complete, all-reduced gradients of that step (it is at VOTE), else
    ``None``."""
    vote: Vote | None
    """That of ``committed_step``."""
    held: tuple[int, ...]
    """Layers whose state it holds complete at ``committed_step``; under ZeRO-1, whose parameters and buffers."""
    lineage: int = 0
    """That of the last Resume obeyed. If it is not the cluster's, all of this is of a past that was undone."""
    parts: tuple[StatePart, ...] = ()
    """Under ZeRO-1: parts of layers of which it has the optimizer state, and the parameters at least; otherwise
    empty."""
    evaluation: Evaluation | None = None
    """Evaluation of the state after ``committed_step``, if the group evaluated it before it stopped."""


class DeviceReport(TrainerState, frozen=True, kw_only=True):
    """State of the trainer of one device of a node."""

    device: int


PROTOCOL = 9
"""Of what daemons and trainers of a cluster say to each other: another number, another language. Raised with
every change that a side that does not know it would misunderstand."""


class NodeFacts(Struct, frozen=True, kw_only=True):
    """What a node says about itself when it appears."""

    devices: int
    host: str
    """Address under which other nodes reach its trainers and its rendezvous server."""
    rendezvous_port: int
    chaos_allowed: bool = False
    snapshot_port: int = 0
    """Where it serves what it keeps of snapshots; 0: nowhere."""
    snapshot_bytes: int = 0
    """That snapshots may take here, all devices together; 0: it did not say."""
    secret_fingerprint: str = ""
    """The same on all nodes that have the same secret, of which it says nothing; empty: it did not say."""
    protocol: int = PROTOCOL


class RepeatedError(Struct, frozen=True, kw_only=True):
    """The job's code raised in a step that nobody has committed since."""

    step: int
    generation: int
    """Of the group in which it did, last."""
    tries: int
    """Groups in which it did."""
    error: str
    nodes: tuple[str, ...]
    """Where it raised this error, the last one last."""


class CommittedStep(Struct, frozen=True, kw_only=True):
    step: int
    vote: Vote


class ProfiledJob(Struct, frozen=True, kw_only=True):
    """A job with its measured profile: all that templates depend on."""

    job: Job
    profile: ModelProfile


class HeldSnapshot(Struct, frozen=True, kw_only=True):
    """A snapshot of which a node holds its whole part, every device's, complete and verified."""

    job_id: str
    step: int
    generation: int
    """Under which it was taken: a step that was undone and done again is another state."""
    owner: str = ""
    """Node whose part it is, where this is a copy that its buddy keeps; empty: the node's own."""


class SnapshotGroup(Struct, frozen=True, kw_only=True):
    """Layers ``[first_layer, end_layer)``, which the same nodes own, one in each pipeline."""

    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    """Node names in the order of the pipelines; each keeps its shard."""
    protection: str
    replica_peer: str = ""
    """Where there is one owner: the node that keeps a copy of its shard; empty: nobody does."""
    whole: bool = False
    """Each owner keeps all of it, in parts of its devices, since the devices of a stage hold shards. Otherwise
    owners share it out as ``protection`` says."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """A globally completed snapshot, of the state behind the commit of ``step``: what a rollback goes to."""

    step: int
    generation: int
    vote: Vote
    groups: tuple[SnapshotGroup, ...]
    size_bytes: int = 0
    """Kept by all nodes together, protection included."""
    at: float = 0.0
    """When it was completed everywhere."""

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted({owner for group in self.groups for owner in group.owners}))

    @property
    def replica_peers(self) -> dict[str, str]:
        """Owner → the node that keeps a copy of its part."""
        return {group.owners[0]: group.replica_peer for group in self.groups if group.replica_peer}


class ReplicaPeer(Struct, frozen=True, kw_only=True):
    """Another node, as the one whose shards it is to keep reaches it."""

    node: str
    address: str
    """host:port of its snapshot server."""


class Restore(Struct, frozen=True, kw_only=True):
    """Everybody drops its state and takes that of a snapshot, or of a persistent checkpoint (``url``)."""

    job_id: str
    step: int
    generation: int
    """Of the snapshot; 0: of a checkpoint."""
    groups: tuple[SnapshotGroup, ...]
    sources: dict[str, str]
    """Node that holds shards of it, its own or copies → host:port of its snapshot server."""
    url: str = ""
    """Where the checkpoint of ``step`` lies; then there are neither groups nor sources."""
    job_name: str = ""
    """Under which it was written."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A complete persistent checkpoint, of the state behind the commit of ``step``."""

    step: int
    vote: Vote
    layers: int
    """How many the model has."""
    size_bytes: int = 0


class SkippedCheckpoint(Struct, frozen=True, kw_only=True):
    """Something at the place of the checkpoints that is none, or is not to be used."""

    step: int | None
    reason: str
