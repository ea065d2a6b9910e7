"""Plain immutable values that messages, events and effects share.

Three numbers fence stale messages: a node's *incarnation* (an integer, new at each start of its daemon),
the *generation* of the plan (one per reconfiguration, never reused), and the *step*. Times named ``at`` are
seconds on one monotonic clock; durations end in ``_s``.
"""

import sys
from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from planner.values import Device, ModelProfile, Policy, StatePart
from storage.values import LayerFile as LayerFile  # noqa: PLC0414 (It is a word of this vocabulary, too.)

MAX_COUNTER = 2**53
"""Largest value of any counter: what every reader of JSON, and the journal, can hold."""
MAX_DEVICES = 4096
"""Most devices of a node."""
MAX_METRICS = 32
"""Most metrics of its own that a training function may report in one step."""
MAX_METRIC_NAME_CHARACTERS = 64
"""Most characters in the name of one of them."""

# Limits are checked when a message is decoded.
Counter = Annotated[int, Meta(ge=0, le=MAX_COUNTER)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration, in seconds."""
Measured = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""A measured speed or time, which is finite."""
Port = Annotated[int, Meta(ge=0, le=65535)]
ShortText = Annotated[str, Meta(max_length=500)]
Metrics = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_NAME_CHARACTERS)], float],
    Meta(max_length=MAX_METRICS),
]
"""The training function's own metrics, by name."""


class NodeState(StrEnum):
    """State of a node (REFT §4.4)."""

    HEALTHY = "HEALTHY"
    SNAP = "SNAP"
    COMPLETED = "COMPLETED"
    UNHEALTHY = "UNHEALTHY"
    OFFLINE = "OFFLINE"


class ClusterPhase(StrEnum):
    WAITING = "WAITING"
    """There is no job, or its first plan is not running yet."""
    RUNNING = "RUNNING"
    QUIESCING = "QUIESCING"
    """A new generation was announced; reports of (step, phase, holdings) are arriving."""
    RECOVERING = "RECOVERING"
    """The planner makes a plan, or survivors rendezvous and move state under it."""
    PAUSED = "PAUSED"
    """There are too few nodes, or only absent nodes or checkpoints may have the state. Survivors wait."""
    FINISHED = "FINISHED"
    FAILED = "FAILED"


RECOVERY_PHASES = {
    "detect": "detected_ms",
    "wait": "waited_ms",
    "quiesce": "quiesce_ms",
    "plan": "plan_ms",
    "state": "state_ms",
    "resume": "resume_ms",
}
"""Phases of a recovery in order, each with the field of its duration. They add up to ``total_ms``; see
``statemachine.cluster.recovery_times``.
"""
MeasuredFrom = Literal["fault", "estimate", "detection"]
"""Begin of a recovery: the injected fault, the last sign of life of what failed, or the moment when the
coordinator knew.
"""


class NodeActivity(StrEnum):
    """Activity of a node's trainers, as its heartbeats report it."""

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
    """The plan has no rank for this node."""


class StartupStage(StrEnum):
    """Part of the start of a cluster, from its nodes to the first step of a job; in this order."""

    NODES = "nodes"
    """Nodes join the cluster and start their trainers."""
    BUILDING = "building"
    """One node builds the model, to measure it."""
    MEASURING = "measuring"
    """It measures the layers."""
    PLANNING = "planning"
    """Plans are made for several numbers of nodes."""
    PREPARING = "preparing"
    """The other nodes complete their models."""
    FORMING = "forming"
    """The nodes form their groups."""
    FIRST_STEP = "first_step"
    """The groups compute the first step."""


class BuildStage(StrEnum):
    """Part of the preparation of a trainer."""

    STARTING = "starting"
    """Processes start and connect to their node."""
    FUNCTION = "function"
    """The training function runs."""
    CUTTING = "cutting"
    """The model is cut into layers."""
    CHECKING = "checking"
    """The model is cut into layers, and its parts are compared with the whole."""
    MEASURING = "measuring"
    """The layers are measured."""


class BuildProgress(Struct, frozen=True, kw_only=True):
    """Progress of the preparation of a trainer, or of the trainers of a node."""

    stage: BuildStage
    done: int = 0
    """Number of processes that have started, or of layers that were measured."""
    total: int = 0
    """Number of them in total; 0: the stage cannot be counted."""


FailureCause = Literal["exited", "raised", "hung", "unprepared", "foreign"]
"""Cause of a trainer's failure: its process ended; its code raised; it made no progress; it could not build
the job; the state to restore belongs to another model.
"""

QuarantineCause = Literal[
    "raised",
    "hung",
    "crashed",
    "device",
    "checksum",
    "corruption",
    "wrong_device",
    "slow_device",
    "slow_link",
]
"""Category of failures of a node that count towards its quarantine: a trainer raised; it made no progress; a
signal ended its process because of an error; a device reported an error; bytes in memory changed; values that
it computed differ from those of its replicas. In a health check: a device computed a wrong product; a device
was slower than those of other nodes, or its test did not end; the network was slower than that of other nodes.
"""


class NodeFailure(Struct, frozen=True, kw_only=True):
    """A failure of a node, as evidence for its quarantine."""

    cause: QuarantineCause
    at: float
    step: int
    """The step that was being computed: the one after the last committed step."""
    generation: int
    detail: str
    """Last line of the exception, or a sentence."""


class Quarantine(Struct, frozen=True, kw_only=True):
    """State of a node that was set aside: it gets no work until it is readmitted."""

    cause: QuarantineCause
    at: float
    reason: str
    evidence: tuple[NodeFailure, ...]
    """The failures that led to it, oldest first."""


class DeviceHealth(Struct, frozen=True, kw_only=True):
    """Result of the test of one device."""

    device: int
    kind: ShortText = ""
    """Model of the device; only devices of one kind are compared. Empty: the test did not get so far."""
    wrong: ShortText = ""
    """Sentence about a product that was not exact; empty: all were exact."""
    failed: ShortText = ""
    """Reason why the test did not end: it hung, or its process ended; empty: it ended."""
    compute_gflops: Measured = 0.0
    """Speed of a product of float32 matrices, in 10**9 operations a second; 0: not measured."""
    memory_gb_s: Measured = 0.0
    """Bandwidth of a copy in the device's memory, in 10**9 bytes a second; 0: not measured, as on a CPU, whose
    memory everything on the host shares.
    """


class LinkHealth(Struct, frozen=True, kw_only=True):
    """Result of a short transfer from another node."""

    node: str
    latency_ms: Measured
    """Time of the shortest request, in milliseconds."""
    mb_s: Measured
    """Bandwidth of the transfer, in 10**6 bytes a second."""


class HealthReport(Struct, frozen=True, kw_only=True):
    """Result of a health check of a node."""

    number: Counter
    """Number of the check among those of the node's incarnation, from 1."""
    devices: Annotated[tuple[DeviceHealth, ...], Meta(min_length=1, max_length=MAX_DEVICES)]
    links: Annotated[tuple[LinkHealth, ...], Meta(max_length=16)] = ()
    """Transfers from the peers that the coordinator named and that answered."""


PlantedFault = Literal["", "wrong", "slow", "hung"]
"""Fault that fault injection plants in the test of a device; empty: none."""


QuiesceMode = Literal["abort", "boundary"]
"""Stop at once and unwind, or stop together after the step in flight (joins, drains)."""


class Evaluation(Struct, frozen=True, kw_only=True):
    """Result of evaluating the state after one committed step on the held-out data set."""

    loss: float
    """Mean over the held-out samples: the sum of the loss terms over ``weight``; NaN if ``weight`` is 0."""
    weight: float
    """Total weight of the loss: rows, or the tokens that count."""
    metrics: Metrics = {}
    """The training function's own metrics, averaged over the held-out samples."""
    took_s: Duration


NotFiniteValue = Literal["output", "loss", "gradient", "parameter_gradient"]
"""Value that a layer computes: its output in the forward pass; the loss, which counts as the last layer's; the
gradient of its input in the backward pass; the gradient of one of its parameters.
"""


class NotFinite(Struct, frozen=True, kw_only=True):
    """The first value of a step that was NaN or infinite, in the order in which a step computes them."""

    layer: int
    name: str
    """Name of the layer for messages, as the model has it, with its class."""
    value: NotFiniteValue
    nodes: tuple[str, ...]
    """Nodes that computed it. A parameter's gradient is known only as a sum over its owners: these are all of
    them.
    """


class Vote(Struct, frozen=True, kw_only=True):
    """Facts about one step that every rank knows once the step has passed the VOTE.

    A survivor that rolls forward applies the step from this alone, so everything that the update depends on
    is here.
    """

    loss: float
    """Mean loss over the global batch: the sum of the loss terms over ``weight``."""
    gradient_norm: float
    """Norm before clipping, of the gradients of the mean loss (not scaled)."""
    skipped: bool = False
    """Whether the step commits without an update, because a gradient was not finite (as with AMP) or
    ``weight`` is 0.
    """
    weight: float = 1.0
    """Total weight of the global batch's loss: rows, or the tokens that count."""
    loss_scale: float = 1.0
    """float16: factor by which the loss, and so every gradient, was multiplied in this step."""
    learning_rate: float = 0.0
    """Learning rate of this step, of the optimizer's first parameter group; 0 if it is unknown."""
    metrics: Metrics = {}
    """The training function's own metrics, averaged over the global batch like the loss."""
    evaluation: Evaluation | None = None
    """Evaluation of the state before this step, if the group evaluated it. No rank reaches this VOTE without
    its result.
    """
    skipped_batches: tuple[int, ...] = ()
    """Batches that the sample order left out when the step was computed, ascending (``batch_of``)."""
    not_finite: NotFinite | None = None
    """First value that was not finite, if ``skipped`` and a value of one layer explains it."""


class UpdatePolicy(Struct, frozen=True, kw_only=True):
    """Keys of ``[training]`` that say when a job must not go on as if its updates improved the model."""

    max_skipped: int = 20
    """Fail the job after so many updates in a row that were skipped because a value was not finite (or because
    no term of the loss counted), and if more than half of all updates were skipped; 0: never. A step that only
    lowers the loss scale of float16 does not count.
    """
    on_spike: Literal["continue", "skip"] = "continue"
    """``skip``: when the loss is a spike, return to the newest snapshot before that step and leave its batch out
    from then on.
    """
    spike_deviations: float = 8.0
    """Robust standard deviations above the median of the last losses from which a loss is a spike."""
    spike_window: int = 50
    """Number of last losses with which a loss is compared; none is a spike before there are so many."""


def batch_of(step: int, skipped_batches: tuple[int, ...]) -> int:
    """Return the batch on which a step trains: step t uses the t-th batch, from 1, that is not skipped.

    :param skipped_batches: ascending.
    """
    batch = step
    for skipped in skipped_batches:
        batch += skipped <= batch
    return batch


class SnapshotPolicy(Struct, frozen=True, kw_only=True):
    """In-memory checkpoints of a job."""

    every_steps: int = 0
    """Take a snapshot after every so many steps; 0: none."""
    protection: str = "none"
    """Losses that a group of owners tolerates: a scheme of ``storage.codes``."""
    auto_interval: bool = False
    """Treat ``every_steps`` as a first value and then derive it from measurements (``intervals``)."""
    cheap_share: float = 0.01
    """Share of a step: with ``auto_interval``, a snapshot that costs no more is taken after every step."""
    paused: bool = False
    """Take no snapshots for now, except on request."""
    auto_protection: bool = False
    """Choose a protection with every plan; ``protection`` is the last choice."""


class CheckpointOptions(Struct, frozen=True, kw_only=True):
    """Keys that a job file and a job share about persistent checkpoints. Paths are relative to the
    job file in a job file, and absolute in a job.
    """

    url: str = ""
    """A directory, relative to the job file, or a URL of fsspec, that the coordinator and all nodes can reach."""
    keep: int = 3
    """Complete checkpoints to retain; older ones are removed."""
    resume: bool = True
    """Continue from the newest checkpoint there; false: reject the job if there are any."""
    huggingface_every_steps: int = 0
    """Export the first checkpoint that is so many steps after the last exported one for from_pretrained too."""
    huggingface_directory: str = ""
    """A directory for these exports, relative to the job file, that every coordinator can reach."""


class CheckpointPolicy(CheckpointOptions, frozen=True, kw_only=True):
    """Persistent checkpoints of a job."""

    every_steps: int = 0
    """Write the first snapshot that is so many steps after the last checkpoint as a checkpoint; 0: write none."""
    auto_interval: bool = False
    """Treat ``every_steps`` as a first value and then derive it from measurements (``checkpoint_intervals``)."""


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
    """Destinations to which the leading coordinator logs the committed steps of a job, in addition to its
    journal.

    Paths are relative to the job file in a job file, and absolute in a job. Without ``directory`` a job
    logs nothing.
    """

    directory: str = ""
    """Directory of ``<job id>/steps.jsonl``, relative to the job file, which the hosts of all coordinators
    share; left out: ``tensorboard``'s directory, or ``logs`` if another sink is named.
    """
    tensorboard: str = ""
    """Directory of event files, relative to the job file; each job has a run below it."""
    wandb: WandbPolicy | None = None
    mlflow: MlflowPolicy | None = None


class ProtectionRequest(Struct, frozen=True, kw_only=True):
    """Protection of snapshots that is requested together with a plan."""

    scheme: str | None
    """Requested scheme; ``None``: the cheapest one that tolerates ``losses``."""
    losses: int
    zero1: bool = False
    limits: dict[str, int] = {}
    """Most bytes that snapshots may take on each node that reported a limit."""
    own_limits: dict[str, int] = {}
    """Most bytes that a node's own snapshots may take, where the rest of its limit is for copies."""


class ProtectionChoice(Struct, frozen=True, kw_only=True):
    scheme: str
    reason: str
    fallback: bool = False
    """Whether the owners of this plan cannot have the requested scheme."""


class Job(Struct, frozen=True, kw_only=True):
    """A submitted job. ``training`` is plain data for the runtime; the state machines do not interpret it."""

    job_id: str
    name: str
    steps: int
    policy: Policy
    training: dict[str, Any] = {}
    horizon_s: float | None = None
    """Expected time to the next failure, if the user knows it; ``None``: learned (``horizon``)."""
    snapshot: SnapshotPolicy = SnapshotPolicy()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    logging: LoggingPolicy = LoggingPolicy()
    updates: UpdatePolicy = UpdatePolicy()
    compare_replicas_every: int = 0
    """Steps between two comparisons of the copies of each layer; 0: never (``replicas``)."""


class HeldPart(Struct, frozen=True, kw_only=True):
    """A part that a device of the new plan holds at the resume step under ZeRO-1: the range of ``StatePart``
    of each of the layers ``[first_layer, end_layer)``.
    """

    device: Device
    first_layer: int
    end_layer: int
    start: int
    end: int
    of: int
    replica: bool
    whole: bool
    """Whether the device also holds all parameters and buffers of these layers."""


class TrainerState(Struct, frozen=True, kw_only=True):
    """State of a trainer that has quiesced."""

    committed_step: int
    """The last step that it applied."""
    ready_step: int | None
    """``committed_step + 1`` if it holds the complete, all-reduced gradients of that step (it is at VOTE),
    else ``None``.
    """
    vote: Vote | None
    """Vote of ``committed_step``."""
    held: tuple[int, ...]
    """Layers whose state it holds complete at ``committed_step``; under ZeRO-1, layers whose parameters and
    buffers it holds.
    """
    lineage: int = 0
    """Lineage of the last Resume obeyed. If it is not the cluster's, this whole state belongs to steps that
    were undone.
    """
    parts: tuple[StatePart, ...] = ()
    """Parts of layers of which it holds the optimizer state and at least the parameters; empty without
    ZeRO-1.
    """
    evaluation: Evaluation | None = None
    """Evaluation of the state after ``committed_step``, if the group evaluated it before it stopped."""


class DeviceReport(TrainerState, frozen=True, kw_only=True):
    """State of the trainer of one device of a node."""

    device: int
    resumed: int = 0
    """Generation of the last Resume that the node received, whose plan says which layers its gradients are of; 0: none.
    """


PROTOCOL = 11
"""Version of the protocol between the daemons and trainers of a cluster. Raise it with every change that a
side which does not know it would misunderstand.
"""


class NodeFacts(Struct, frozen=True, kw_only=True):
    """Facts that a node reports about itself when it appears."""

    devices: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    host: str
    """Address at which other nodes reach its trainers and its rendezvous server."""
    rendezvous_port: Port
    chaos_allowed: bool = False
    snapshot_port: Port = 0
    """Port at which it serves its snapshots; 0: it serves none."""
    snapshot_bytes: int = 0
    """Most bytes that snapshots may take here, all devices together; 0: not reported."""
    snapshot_limited: bool = False
    """True if ``snapshot_bytes`` is a configured limit, of which half is for copies if there may be any; false if it
    is the size of the file system.
    """
    secret_fingerprint: str = ""
    """A value that is equal on all nodes with the same secret and does not reveal the secret; empty: not
    reported.
    """
    protocol: int = PROTOCOL
    log: str = ""
    """Command or file with which people read its log on its host; empty: there is none that lasts."""
    checks_health: bool = False
    """Whether it tests its devices; it is in no plan before the first test has ended."""

    @property
    def snapshot_server(self) -> str:
        """Return host:port of its snapshot server."""
        return f"{self.host}:{self.snapshot_port}"


class Divergence(Struct, frozen=True, kw_only=True):
    """Copies of layers that should be equal, and are not: the state of some device is corrupt."""

    step: int
    """Step after which they were compared."""
    generation: int
    agreed_step: int
    """The newest step before it after which all copies were compared and agreed; 0: none."""
    layers: tuple[int, ...]
    digests: dict[str, str]
    """Digest of the first of these layers by node."""
    nodes: tuple[str, ...]
    """Nodes that hold copies of these layers."""
    minority: tuple[str, ...]
    """Nodes whose copies differ from those of the majority; empty: there is no majority that proves it."""
    announced: bool = False
    """Whether it was published, and these nodes were set aside."""


class RepeatedError(Struct, frozen=True, kw_only=True):
    """An error that the job's code raised in a step that no rank has committed since."""

    step: int
    generation: int
    """Generation of the last group in which it raised."""
    tries: int
    """Number of groups in which it raised."""
    error: str
    nodes: tuple[str, ...]
    """Nodes on which it raised this error, the last one last."""


class NodeErrors(Struct, frozen=True, kw_only=True):
    """Failures of a node's trainers during a job that nobody injected."""

    times: int
    errors: dict[str, int]
    """Number of failures by their reason in a line."""


class CommittedStep(Struct, frozen=True, kw_only=True):
    step: Counter
    vote: Vote


class ProfiledJob(Struct, frozen=True, kw_only=True):
    """A job with its measured profile: everything that templates depend on."""

    job: Job
    profile: ModelProfile


class HeldSnapshot(Struct, frozen=True, kw_only=True):
    """A snapshot of which a node holds its whole part, that of every device, complete and verified."""

    job_id: str
    step: int
    generation: int
    """Generation under which it was taken. A step that was undone and done again has another state."""
    owner: str = ""
    """Node whose part it is, if this is a copy that a replica peer holds; empty: the node's own part."""


class SnapshotGroup(Struct, frozen=True, kw_only=True):
    """Layers ``[first_layer, end_layer)`` that the same nodes own, one in each pipeline."""

    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    """Node names in the order of the pipelines; each holds its shard."""
    protection: str
    replica_peer: str = ""
    """Node that holds a copy of a single owner's shard; empty if none does."""
    whole: bool = False
    """Whether each owner holds all of it, in parts of its devices, because the devices of a stage hold shards.
    Otherwise the owners share it out as ``protection`` says.
    """


class Snapshot(Struct, frozen=True, kw_only=True):
    """A globally completed snapshot of the state after the commit of ``step``: the target of a rollback."""

    step: int
    generation: int
    vote: Vote
    groups: tuple[SnapshotGroup, ...]
    size_bytes: int = 0
    """Bytes that all nodes hold together, protection included."""
    at: float = 0.0
    """Time at which it was complete everywhere."""

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(sorted({owner for group in self.groups for owner in group.owners}))

    @property
    def replica_peers(self) -> dict[str, str]:
        """Return, for each owner with a replica peer, the node that holds a copy of its part."""
        return {group.owners[0]: group.replica_peer for group in self.groups if group.replica_peer}


class ReplicaPeer(Struct, frozen=True, kw_only=True):
    """The node that holds snapshot copies for another node, as that node reaches it."""

    node: str
    address: str
    """host:port of its snapshot server."""


class Restore(Struct, frozen=True, kw_only=True):
    """The snapshot, or the persistent checkpoint (``url``), whose state replaces the state of all trainers."""

    job_id: str
    step: int
    generation: int
    """Generation of the snapshot; 0: it is a checkpoint."""
    groups: tuple[SnapshotGroup, ...]
    sources: dict[str, str]
    """Each node that holds shards of it, its own or copies → host:port of its snapshot server."""
    url: str = ""
    """Location of the checkpoint of ``step``; there are no groups and sources then."""
    job_name: str = ""
    """Name of the job that wrote it."""


class CheckpointRecord(Struct, frozen=True, kw_only=True):
    """A complete persistent checkpoint of the state after the commit of ``step``."""

    step: int
    vote: Vote
    layers: int
    """Number of layers of the model."""
    size_bytes: int = 0


class SkippedCheckpoint(Struct, frozen=True, kw_only=True):
    """An entry at the checkpoint location that is no checkpoint or must not be used."""

    step: int | None
    reason: str
