"""Messages between a node daemon and its trainers, over a unix socket.

``runtime.wire.frames`` encodes them. Devices have ranks here: ``WorldData`` is a plan as a trainer needs
it.

Order of messages in a trainer's life::

    node → trainer   PrepareJob         build the job's model, dataset, optimizer factory
    trainer → node   ModelDescribed     if PrepareJob asks for it
                     Prepared | Raised
    node → trainer   Quiesce(g, mode)   enter generation g: stop (abort | boundary) and report
    trainer → node   TrainerQuiesced(g, …)
    node → trainer   ResumeRank(g, …)   roll forward or redo, meet the others, move state, train
    trainer → node   Resumed(g, …), then TrainerStepped … until a Quiesce or the last step
                     StagingCorrupted(g, …) if the staged state is corrupt: ResumeRank(g, …) follows again
    trainer → node   Finished(g, …)     after the last step; the trainer stays and can be quiesced
    trainer → node   TrainerHeartbeat   all the time, from the control thread
    node → trainer   Exit

A snapshot: StartSnapshot(g) goes to any trainer. At the next VOTE all trainers send SnapshotStarted(g, s),
then ShardWritten(g, s, …) or SnapshotFailed(g, s, …) while training continues. RetainLocalSnapshot(s) goes
to all when s is complete everywhere. RepairWrite(s, …) may come at any time: the daemon found corrupt bytes
of s and reconstructed them.

ReplicaDigests(g, s, …) comes before the TrainerStepped of s + 1 if replicas are compared after s.
OptimizerReplicaDiverged may follow any TrainerStepped if optimizer state is sharded and has replicas.

A Quiesce may come at any moment, also right after PrepareJob, during a rendezvous or during a state
transfer.
"""

from typing import Annotated, Any, Literal

import msgspec

from planner.values import ActivationCheckpointing, Recompute, Within, WithinNode
from statemachine.messages.common import (
    Finished,
    Message,
    OptimizerReplicaDiverged,
    PeerSuspected,
    Prepared,
    Quiesce,
    ReplicaDigests,
    Resumed,
    SnapshotFailed,
    SnapshotStarted,
)
from statemachine.messages.trace import Trace, Traced
from statemachine.messages.values import BuildProgress, TrainerState, UpdatePolicy, Vote

Precision = Literal["float32", "tf32", "bfloat16", "float16", "float64"]


class WorldStage(msgspec.Struct, frozen=True, kw_only=True):
    """Layers ``[first_layer, end_layer)`` on these global ranks, which split each microbatch by rows."""

    first_layer: int
    end_layer: int
    ranks: tuple[int, ...]
    recompute: Recompute = "none"
    within: Within = "replicate"
    replicas: int = 1
    """As in ``planner.values.StageTemplate``."""

    @property
    def parts(self) -> int:
        """Number of parts into which the stage's state is divided."""
        return 1 if self.within == "replicate" else len(self.ranks) // self.replicas


class WorldPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Stages of a pipeline in order, and the range of the global batch's microbatches that it computes."""

    stages: tuple[WorldStage, ...]
    first_microbatch: int
    microbatches: int


class TransferData(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer of the whole state of ``layer`` from rank ``source`` to rank ``target``."""

    layer: int
    source: int
    target: int


class PartData(msgspec.Struct, frozen=True, kw_only=True):
    """A range of ``layer`` that rank ``rank`` of the new world holds at the resume step (ZeRO-1).

    The range covers elements [n·start // of, n·end // of) of each vector of n elements
    (``runtime.zero.parts``): of the layer's parameters and of the optimizer state for them. With ``whole``
    the rank also holds all parameters and buffers of the layer.
    """

    rank: int
    layer: int
    start: int
    end: int
    of: int
    replica: bool
    """Whether the range is held on the host next to the rank's own part (AOR)."""
    whole: bool


class WorldData(msgspec.Struct, frozen=True, kw_only=True):
    """The training group of one generation, the same on every rank. Rank r communicates from ``hosts[r]``."""

    pipelines: tuple[WorldPipeline, ...]
    transfers: tuple[TransferData, ...]
    """Transfers of layers; empty under ZeRO-1, where ``held_parts`` determines them."""
    hosts: tuple[str, ...]
    held_parts: tuple[PartData, ...] = ()
    """Parts held by all ranks of this world under ZeRO-1; empty otherwise."""
    step_s: float = 0.0
    """Expected duration of a step under the plan, in seconds; 0: unknown."""


class TrainingOptions(UpdatePolicy, frozen=True, kw_only=True):
    """Keys of ``[training]`` in a job file that a job's trainers and its coordinator use unchanged."""

    seed: int = 0
    """Seed of all random numbers: weights, order of samples, dropout."""
    precision: Precision = "float32"
    """Precision of the computation. Parameters and optimizer state stay in float32 (float64 with ``float64``)."""
    compile: bool = False
    """Compile each layer with ``torch.compile``."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute activations in the backward pass to save memory: everything that follows from a layer's input
    (``full``), or all except matrix products and attention (``selective``). ``auto`` recomputes only in
    stages that would not fit otherwise.
    """
    backend: Literal["gloo", "nccl"] = "gloo"
    """Backend that carries tensors between trainers: nccl between GPUs, one for each trainer; gloo through host
    memory, also between trainers that share a GPU.
    """
    zero1: bool = False
    """Each owner of a layer keeps only its part of the optimizer state."""
    compare_replicas_every: Annotated[int, msgspec.Meta(ge=0)] = 50
    """Steps between two comparisons of the copies of each layer, which find silent corruption; 0: never. They are
    also compared with each snapshot.
    """


class TrainingData(TrainingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a job that a trainer needs; it is validated again when a trainer receives it."""

    function: str
    """``path/to/file.py:name`` or ``package.module:name``."""
    path: str
    """Directory from which relative paths and imports start."""
    steps: int
    global_batch: int
    microbatch_rows: int
    clip_gradient_norm: float | None = None
    device_peak_tflops: float = 0.0
    """Peak of one device in this precision, for MFU; 0: that of the CUDA device, if it is known."""
    profile_given: bool = False
    """Whether the user supplied a profile: no trainer of the cluster measures the model, and each one verifies
    the profile.
    """
    data_workers: int = 0
    """Processes per trainer that read samples ahead; 0: the trainer reads them itself."""
    evaluation_every_steps: int = 0
    """Evaluate after every so many steps and after the last one; 0: never."""
    evaluation_batches: int = 0
    """Global batches of the held-out data set in one evaluation, from its beginning; 0: all of it."""
    device: str = "cpu"
    """Device type that trainers compute on, ``cpu`` or ``cuda``. With ``gloo`` several trainers may share a
    GPU.
    """
    within_node: WithinNode = "replicate"
    """Way in which the devices of a stage share its work; ``auto``: as the planner chose for each stage."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments for the function: plain data that JSON can represent."""


# --- node → trainer ----------------------------------------------------------------------------


class PrepareJob(Message, frozen=True, kw_only=True):
    job_id: str
    training: TrainingData
    profile: bool
    devices_per_node: int = 1
    """The profile includes the times of stages of up to this many devices."""
    arena: str = ""
    """Directory of this device's arena, in a memory file system; empty: no snapshots."""
    arena_limit_bytes: int | None = None
    """Limit of the arena's slots together; ``None``: the file system is the limit."""
    describe: bool = False
    """Whether to send a description of the model, for checkpoints, before ``Prepared``."""
    planned_memory_bytes: int | None = None
    """Memory that the job's plans assume of each device; ``None``: no limit, or not known before the profile."""
    memory_limit_bytes: int | None = None
    """Memory that this node allows its devices; ``None``: all that they have."""


class ResumeRank(Message, frozen=True, kw_only=True):
    generation: int
    step: int
    vote: Vote | None
    rank: int
    """Rank of this trainer; -1: it is not in the plan and keeps its state until the next order."""
    world: WorldData
    rendezvous_host: str
    rendezvous_port: int
    token: str
    """Shared secret of the rendezvous server."""
    nodes: tuple[str, ...] = ()
    """Name of the node of each rank, by which snapshots name the owners. Empty: no snapshots are taken."""
    protection: str = "none"
    """Scheme of ``storage.codes``: what each owner keeps next to its own part."""
    restore: str = ""
    """Directory with the staged state (``storage.staged``) at ``step`` of each layer that this rank needs; the
    rank drops what it holds.
    """
    lineage: int = 0
    """Lineage of this generation. A trainer of another lineage (that of the last Resume obeyed, 0 before)
    drops all its state first.
    """
    skipped_batches: tuple[int, ...] = ()
    """Batches that the sample order leaves out, ascending."""
    evaluated: int = 0
    """The newest step whose evaluation is known, so that it is not repeated."""
    parked: tuple[int, ...] = ()
    """Layers that this trainer keeps in host memory until the first commit, since its device has no room for
    them.
    """
    dropped: tuple[int, ...] = ()
    """Layers that it drops for the same reason, before new state arrives."""


class StartSnapshot(Message, frozen=True, kw_only=True):
    """Order to let all ranks take a snapshot after the next step; ignored in another generation."""

    generation: int
    last: bool = False
    """Whether all steps are done, so that there is no next one: take it at once. All trainers receive this
    order then.
    """


class RetainLocalSnapshot(Message, frozen=True, kw_only=True):
    """Notice that the snapshot of ``step`` is complete on all nodes: release older ones."""

    step: int
    pinned: int = 0
    """Step of a snapshot that stays too, because it is being written to a persistent checkpoint; 0: none."""


class RepairWrite(Message, frozen=True, kw_only=True):
    """Reconstructed bytes for a corrupt part of a complete snapshot in the arena. The trainer does not answer
    it.
    """

    step: int
    generation: int
    """Generation of the snapshot; the trainer's own generation does not matter."""
    part: str
    offset: int
    """Offset in the part, in bytes."""
    data: bytes


class Sleep(Message, frozen=True, kw_only=True):
    """Chaos: let the main thread sleep for ``seconds`` at its next operation while other threads continue."""

    seconds: float


class Slow(Message, frozen=True, kw_only=True):
    """Chaos: let computing take ``factor`` times as long from now on; 1 ends it."""

    factor: float


class RaiseError(Message, frozen=True, kw_only=True):
    """Chaos: raise an exception from the next microbatch's computation, as if it came from the user's code."""

    detail: str


class FlipBit(Message, frozen=True, kw_only=True):
    """Chaos: flip one bit of a parameter in the device's memory before the next step, as failing hardware does."""


class Exit(Message, frozen=True, kw_only=True):
    pass


Instruction = (
    PrepareJob
    | Quiesce
    | ResumeRank
    | StartSnapshot
    | RetainLocalSnapshot
    | RepairWrite
    | Sleep
    | Slow
    | RaiseError
    | FlipBit
    | Trace
    | Exit
)

# --- trainer → node ----------------------------------------------------------------------------


class Attached(Message, frozen=True, kw_only=True):
    """First frame on the connection, which identifies the device of this trainer."""

    device: int
    pid: int


class ModelDescribed(Message, frozen=True, kw_only=True):
    """Description of the model that its checkpoints store."""

    job_id: str
    description: bytes
    """Result of ``storage.description.encode_description``; empty if the model cannot be described."""


class TrainerQuiesced(Message, TrainerState, frozen=True, kw_only=True):
    """Report that the trainer stopped under ``generation`` and waits for its ResumeRank."""

    generation: int


class StagingCorrupted(Message, frozen=True, kw_only=True):
    """Report that the state which ``ResumeRank.restore`` lends is, or became, corrupt.

    This trainer holds nothing and waits for the same ResumeRank with other bytes.
    """

    generation: int
    part: str
    """The corrupt part of the snapshot; empty: unknown."""
    detail: str


class TrainerStepped(Message, frozen=True, kw_only=True):
    generation: int
    step: int
    vote: Vote
    step_s: float
    bubble_s: float
    """Time in this step for which the main thread waited for peers, in seconds."""
    microbatch_ms: float = 0.0
    """Computing time of the forward and backward pass of one microbatch without waiting, in milliseconds; 0:
    none computed.
    """


class ShardWritten(Message, frozen=True, kw_only=True):
    """Report that this rank's part is in its arena, with a manifest. It may arrive after the generation's end.

    Every rank sends it. A rank that has nothing to write, because others of its stage hold the same,
    reports 0 bytes.
    """

    generation: int
    step: int
    size_bytes: int
    """Bytes in the arena, parity included."""
    copy_s: float
    """Copying time of all threads together, in seconds."""
    stall_s: float
    """Time for which the main thread was stalled: to begin, and before the next APPLY; in seconds."""
    idle_bytes: int
    """Bytes of the state that were read while the main thread waited for peers anyway."""


class TrainerHeartbeat(Message, frozen=True, kw_only=True):
    progress: int
    waiting: bool
    reading: bool = False
    """Whether the trainer reads samples of the data set."""
    build_progress: BuildProgress | None = None
    """Progress of the trainer before it is prepared."""


class Raised(Message, frozen=True, kw_only=True):
    """Report that the training function or a layer raised; the process exits after this."""

    where: Literal["prepare", "restore", "training"]
    """Place where the code raised; ``restore``: the restored state does not fit the model."""
    detail: str
    """Traceback; one sentence if the cause is known."""


SnapshotReport = SnapshotStarted | ShardWritten | SnapshotFailed
MachineReport = (
    Prepared
    | TrainerQuiesced
    | Resumed
    | TrainerStepped
    | OptimizerReplicaDiverged
    | ReplicaDigests
    | Finished
    | SnapshotReport
    | TrainerHeartbeat
    | PeerSuspected
)
"""Reports on which the node's machine decides."""
DaemonReport = Traced | StagingCorrupted | ModelDescribed
"""Reports for other parts of the node daemon: tracing, staging, and writing of checkpoints."""
Report = Attached | MachineReport | Raised | DaemonReport


class Output(Message, frozen=True, kw_only=True):
    """First frame on a trainer's *second* connection; all bytes after it are its raw stdout and stderr.

    Read it with ``readexactly(4)`` and ``readexactly(length)``, then plain ``read`` until the end of the
    stream. A socket leaves no file, and it ends with the process group.
    """

    device: int
    pid: int


FirstFrame = Attached | Output
"""Possible first frames on a connection to the node's socket."""
