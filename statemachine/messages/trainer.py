"""Messages between a node daemon and its trainers, over a unix socket.

Encoded by ``runtime.wire.frames``. Devices have ranks here: ``WorldData`` is a plan as a trainer needs it.

Order of a trainer's life::

    node → trainer   Prepare            build the job's model, dataset, optimizer factory
    trainer → node   Described          where Prepare asks for it
                     Prepared | Raised
    node → trainer   Quiesce(g, mode)   enter generation g: stop (abort | boundary) and report
    trainer → node   Quiesced(g, …)
    node → trainer   Resume(g, …)       roll forward or redo, meet the others, move state, train
    trainer → node   Resumed(g, …), then Stepped … until a Quiesce or the last step
                     StagingCorrupted(g, …) where what it was to go on from is no good: Resume(g, …) once more
    trainer → node   Finished(g, …)      after the last step; the trainer stays, quiescable
    trainer → node   Beat               all the time, from the control thread
    node → trainer   Exit

A snapshot: Snap(g) to any trainer; at the next VOTE Snapping(g, s) from all, then Snapped(g, s, …) or
SnapshotFailed(g, s, …) while training goes on; KeepSnapshot(s) to all when s is complete everywhere.
Mend(s, …) at any time: the daemon found bytes of it changed, and made them again.

OptimizerReplicaDiverged may come behind any Stepped where optimizer state is sharded and has replicas.

A Quiesce may come at any moment, also during Prepare's aftermath, a rendezvous or a state transfer.
"""

from typing import Any, Literal

import msgspec

from planner.values import ActivationCheckpointing, Recompute, Within, WithinNode
from statemachine.messages.base import Message
from statemachine.messages.common import (
    Finished,
    OptimizerReplicaDiverged,
    PeerSuspected,
    Prepared,
    Quiesce,
    Resumed,
    SnapshotFailed,
    SnapshotStarted,
)
from statemachine.messages.trace import Trace, Traced
from statemachine.messages.values import TrainerState, Vote

Precision = Literal["float32", "tf32", "bfloat16", "float16", "float64"]


class WorldStage(msgspec.Struct, frozen=True, kw_only=True):
    """Layers ``[first_layer, end_layer)`` on these global ranks, which split each microbatch by rows."""

    first_layer: int
    end_layer: int
    ranks: tuple[int, ...]
    recompute: Recompute = "none"
    within: Within = "replicate"


class WorldPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order and the run of the global batch's microbatches that this pipeline computes."""

    stages: tuple[WorldStage, ...]
    first_microbatch: int
    microbatches: int


class TransferData(msgspec.Struct, frozen=True, kw_only=True):
    """Rank ``source`` sends the whole state of ``layer`` to rank ``target``."""

    layer: int
    source: int
    target: int


class PartData(msgspec.Struct, frozen=True, kw_only=True):
    """Rank ``rank`` of the new world has a range of ``layer`` at the resume step (ZeRO-1).

    That is elements [n·start // of, n·end // of) of each vector of n (``runtime.zero.parts``): of its parameters
    and of the optimizer's state for them. ``whole``: all parameters and buffers of the layer are there, too.
    """

    rank: int
    layer: int
    start: int
    end: int
    of: int
    replica: bool
    """Kept on the host beside the rank's own part (AOR)."""
    whole: bool


class WorldData(msgspec.Struct, frozen=True, kw_only=True):
    """One generation's training group, the same on every rank (rank r talks from ``hosts[r]``)."""

    pipelines: tuple[WorldPipeline, ...]
    transfers: tuple[TransferData, ...]
    """Empty under ZeRO-1: who sends what follows from ``held_parts``."""
    hosts: tuple[str, ...]
    held_parts: tuple[PartData, ...] = ()
    """Under ZeRO-1, of all ranks of this world; empty otherwise."""
    step_s: float = 0.0
    """Seconds that the plan expects a step to take; 0: unknown."""


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of ``[training]`` in a job file that trainers take as they are written."""

    seed: int = 0
    """Start of all random numbers: weights, order of samples, dropout."""
    precision: Precision = "float32"
    """What computes; parameters and optimizer state stay in float32 (float64 with ``float64``)."""
    compile: bool = False
    """Compile each layer with ``torch.compile``."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute activations in the backward pass to save memory: all that follows from a layer's input
    (``full``), or all but matrix products and attention (``selective``); ``auto``: only in stages that would
    not fit otherwise."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What carries tensors between trainers: nccl between GPUs, of which each trainer has its own; gloo through host
    memory, also between trainers that share a GPU."""
    zero1: bool = False
    """Each owner of a layer keeps its part of the optimizer's state only."""


class TrainingData(TrainingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a job that a trainer needs; validated again at this edge."""

    function: str
    """``path/to/file.py:name`` or ``package.module:name``."""
    path: str
    """Directory that relative paths and imports start from."""
    steps: int
    global_batch: int
    microbatch_rows: int
    clip_gradient_norm: float | None = None
    device_peak_tflops: float = 0.0
    """Peak of one device in this precision, for MFU; 0: that of the CUDA device, where it is known."""
    profile_given: bool = False
    """The user has measured the model before: no trainer of the cluster does, and each one verifies it."""
    data_workers: int = 0
    """Processes per trainer that read samples ahead; 0: the trainer reads them itself."""
    evaluation_every_steps: int = 0
    """Evaluate after every so many steps and after the last one; 0: never."""
    evaluation_batches: int = 0
    """Global batches of the held-out data set in one evaluation, from its beginning; 0: all of it."""
    device: str = "cpu"
    """``cpu`` or ``cuda``: what trainers compute on. Several may share a GPU with ``gloo``."""
    within_node: WithinNode = "replicate"
    """How the devices of the plan's stages share their work; ``auto``: each stage as the planner chose for it."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for the function: plain data as JSON knows it."""


# --- node → trainer ----------------------------------------------------------------------------


class PrepareJob(Message, frozen=True, kw_only=True):
    job_id: str
    training: TrainingData
    profile: bool
    devices_per_node: int = 1
    """The profile tells the times of a stage of 2, 3, … up to so many devices."""
    arena: str = ""
    """Directory of this device's arena, in a memory file system; empty: no snapshots."""
    arena_limit_bytes: int | None = None
    """Of the arena's slots together; ``None`` leaves it to the file system."""
    describe: bool = False
    """Send a description of the model, for checkpoints, before ``Prepared``."""


class ResumeRank(Message, frozen=True, kw_only=True):
    generation: int
    step: int
    vote: Vote | None
    rank: int
    """-1: this trainer is not in the plan; it keeps its state until told otherwise."""
    world: WorldData
    rendezvous_host: str
    rendezvous_port: int
    token: str
    """Shared secret of the rendezvous server."""
    nodes: tuple[str, ...] = ()
    """The node's name of each rank: what snapshots call the owners. Empty: none are taken."""
    protection: str = "none"
    """``storage.codes``: what each owner keeps besides its own part."""
    restore: str = ""
    """Directory with what ``storage.staged`` says at ``step`` of each layer that this rank needs; what it
    holds is dropped."""
    lineage: int = 0
    """A trainer whose own (of the last Resume obeyed, 0 before) is another drops all its state first."""
    evaluated: int = 0
    """The newest step whose evaluation is known, so that it is not repeated."""
    parked: tuple[int, ...] = ()
    """Layers that this trainer keeps in host memory until the first commit: its device has no room for them."""
    dropped: tuple[int, ...] = ()
    """Layers that it drops for the same reason, before new state arrives."""


class StartSnapshot(Message, frozen=True, kw_only=True):
    """Have everybody take a snapshot behind the next step; ignored in another generation."""

    generation: int
    last: bool = False
    """All steps are done, and there is no next one: take it at once, as everybody is told to."""


class RetainLocalSnapshot(Message, frozen=True, kw_only=True):
    """The snapshot of ``step`` is complete on all nodes: older ones are released."""

    step: int
    pinned: int = 0
    """The snapshot of this step stays, too: it is being written to a persistent checkpoint. 0: none."""


class RepairWrite(Message, frozen=True, kw_only=True):
    """Bytes of a part of a complete snapshot in the arena changed there: these were written. Not answered."""

    step: int
    generation: int
    """Of the snapshot; in which the trainer is does not matter."""
    part: str
    offset: int
    """In the part."""
    data: bytes


class Sleep(Message, frozen=True, kw_only=True):
    """Chaos: the main thread sleeps for ``seconds`` at its next operation, other threads live on."""

    seconds: float


class Slow(Message, frozen=True, kw_only=True):
    """Chaos: from now on computing takes ``factor`` times as long; 1 ends it."""

    factor: float


class RaiseError(Message, frozen=True, kw_only=True):
    """Chaos: an exception comes out of the next microbatch's computing, as if it were the user's."""

    detail: str


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
    | Trace
    | Exit
)

# --- trainer → node ----------------------------------------------------------------------------


class Attached(Message, frozen=True, kw_only=True):
    """First frame on the connection: which device's trainer this is."""

    device: int
    pid: int


class ModelDescribed(Message, frozen=True, kw_only=True):
    """The description of the model that its checkpoints keep."""

    job_id: str
    description: bytes
    """What ``storage.description.encode_description`` made."""


class TrainerQuiesced(Message, TrainerState, frozen=True, kw_only=True):
    """The trainer stopped under ``generation`` and waits for its Resume."""

    generation: int


class StagingCorrupted(Message, frozen=True, kw_only=True):
    """What Resume's ``restore`` lends is not, or not any more, what was written. This trainer holds nothing
    and waits for the same Resume with other bytes."""

    generation: int
    part: str
    """The part of the snapshot that is to blame; empty: it is not known."""
    detail: str


class TrainerStepped(Message, frozen=True, kw_only=True):
    generation: int
    step: int
    vote: Vote
    step_s: float
    bubble_s: float
    """Time of this step that the main thread waited for peers."""
    microbatch_ms: float = 0.0
    """Computing the forward and backward pass of one microbatch, waiting excluded; 0: computed none."""


class ShardWritten(Message, frozen=True, kw_only=True):
    """This rank's part is in its arena, with a manifest. May come after the generation's end.

    Said by every rank; one that has nothing to write, as others of its stage have the same, says 0 bytes.
    """

    generation: int
    step: int
    size_bytes: int
    """In the arena, parity included."""
    copy_s: float
    """All threads together."""
    stall_s: float
    """Of the main thread: to begin, and waiting before the next APPLY."""
    idle_bytes: int
    """Of the state, read while the main thread waited for peers anyway."""


class TrainerHeartbeat(Message, frozen=True, kw_only=True):
    progress: int
    waiting: bool
    reading: bool = False
    """Samples of the data set."""
    build_progress: str = ""
    """What the trainer does before it is prepared, in words: "measuring layer 3 of 10"."""


class Raised(Message, frozen=True, kw_only=True):
    """The training function or a layer raised; the process exits after this."""

    where: Literal["prepare", "restore", "training"]
    """``restore``: the state to go on from does not fit the model."""
    detail: str
    """Traceback; a sentence where it is known what is wrong."""


SnapshotReport = SnapshotStarted | ShardWritten | SnapshotFailed
MachineReport = (
    Prepared
    | TrainerQuiesced
    | Resumed
    | TrainerStepped
    | OptimizerReplicaDiverged
    | Finished
    | SnapshotReport
    | TrainerHeartbeat
    | PeerSuspected
)
"""Reports that the node's machine decides on."""
DaemonReport = Traced | StagingCorrupted | ModelDescribed
"""Reports for other parts of the node: who asked for a trace, who staged, who writes checkpoints."""
Report = Attached | MachineReport | Raised | DaemonReport


class Output(Message, frozen=True, kw_only=True):
    """First frame on a trainer's *second* connection: all bytes behind it are its stdout and stderr, raw.

    Read it with ``readexactly(4)`` and ``readexactly(length)``, then plain ``read`` until the end of
    the stream. A socket needs no file that could be left behind, and it ends with the process group.
    """

    device: int
    pid: int


FirstFrame = Attached | Output
"""What the first frame on a connection to the node's socket may be."""
