"""Messages between the coordinator and the nodes: signals from nodes, commands to nodes, and their envelopes.

An envelope carries a node's name and incarnation. From a node, the incarnation is its own; to a node, it is
the one that the coordinator addresses. A node that receives a command for another incarnation ignores,
counts and logs it. Every node receives a command to several nodes (``ToNodes``); nodes that are not listed
ignore it. The codec and the topics are in ``ftd.transport.wire``.
"""

from collections.abc import Mapping

from msgspec import Struct, field

from planner.values import Plan
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
from statemachine.messages.values import (
    BuildProgress,
    CommittedStep,
    Counter,
    DeviceReport,
    Duration,
    FailureCause,
    HealthReport,
    HeldPart,
    HeldSnapshot,
    Job,
    LayerFile,
    Measured,
    NodeActivity,
    NodeFacts,
    ReplicaPeer,
    Restore,
    Snapshot,
    Vote,
)

# --- node → coordinator: signals ---------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """Introduction of a node, sent on each connection to the broker and when a coordinator asks
    (``RequestHello``).
    """

    facts: NodeFacts
    job_id: str | None
    prepared: bool
    """Whether every trainer of this node has built the job ``job_id``."""
    generation: Counter
    """Highest generation that the node has obeyed; 0 before the first."""
    training: bool
    """Whether the node's trainers run under ``generation``: they are neither quiesced nor idle."""
    quiesced: bool = False
    """Whether the node's trainers stopped under ``generation`` and wait for its Resume. If neither this nor
    ``training`` holds, they are new or idle.
    """
    snapshots: tuple[HeldSnapshot, ...] = ()
    """Snapshots that this node's memory holds complete, also those of trainers and daemons that have ended."""
    health: HealthReport | None = None
    """Result of the last health check that has ended; ``None``: none has."""


class Acknowledgement(Struct, frozen=True, kw_only=True):
    """The orders that have reached a node, and the reports that it has sent.

    The coordinator compares it with what it ordered and received, and so finds every message that was lost
    (``statemachine.cluster.acknowledgement``).
    """

    activity: NodeActivity
    job_id: str | None
    """The job that the node's trainers build or train."""
    leaving: bool = False
    """Whether the node has sent Leaving."""
    suspects_peer: bool = False
    """Whether the node has sent PeerSuspected and no commit has disproved it."""
    restore_failed: bool = False
    """Whether the node has sent RestoreFailed under the heartbeat's generation."""
    snap_after: Counter = 0
    """``TakeSnapshot.after_step`` of the newest order obeyed under the heartbeat's generation; 0: none."""
    snapshot_reported: Counter = 0
    """Step of the snapshot that the node's last SnapshotCompleted or SnapshotFailed was about; 0: none."""
    persist_attempt: str = ""
    """Attempt of the last Persist or CancelPersist received; empty: none."""
    persist_reported: bool = False
    """Whether LayersPersisted or PersistFailed was sent for that attempt."""
    health_number: Counter = 0
    """Number of the last health check that was reported; 0: none."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sign of life, sent every ``heartbeat_s``, with the newest committed step that the node knows of."""

    generation: Counter
    committed: CommittedStep | None
    microbatch_ms: tuple[Measured, ...] | None = None
    """Median computing time of a microbatch under ``generation`` for each device, in milliseconds; 0 or
    ``None``: unknown.
    """
    lineage: Counter = 0
    """Lineage of ``committed``, which is that of the last Resume obeyed."""
    retained_step: Counter = 0
    """Step of the snapshot of its job that the last ``RetainSnapshot`` named."""
    corrupt_step: Counter = 0
    """Step of the snapshot that has corrupt bytes here which cannot be repaired; 0: none."""
    repairs: Counter = 0
    """Number of times that bytes of a snapshot had changed in this node's memory and were repaired, since the
    incarnation began.
    """
    building: BuildProgress | None = None
    """Progress of this node's trainers until all of them have built the job, or wait for one."""
    acknowledgement: Acknowledgement | None = None
    """Orders and reports so far; ``None``: the sender makes no statement."""


class Quiesced(Message, frozen=True, kw_only=True):
    """Report that every trainer has stopped under ``generation``, with one entry for each device that is alive
    and prepared.
    """

    generation: Counter
    reports: tuple[DeviceReport, ...]


class Stepped(Message, frozen=True, kw_only=True):
    """Steps committed since the last such message, oldest first. The node of rank 0 sends it."""

    generation: Counter
    steps: tuple[CommittedStep, ...]
    step_s: Duration
    """Duration of the newest step, in seconds."""
    requested_first: Counter | None = None
    """``first`` of the ``RequestSteps`` that this answers. ``steps`` may then be empty: the node does not know
    them.
    """
    lineage: Counter = 0
    """Lineage of the last Resume obeyed."""


class TrainerLost(Message, frozen=True, kw_only=True):
    """Report that a trainer of this node failed. The node is UNHEALTHY until it sends ``Prepared`` again."""

    generation: Counter
    device: Counter
    cause: FailureCause
    detail: str
    """Text with the exit status or the exception, and the end of the trainer's stderr."""
    unnoticed_s: Duration = 0.0
    """Seconds from the last sign of life of a trainer that hung until this was noticed; 0 for other failures."""


class Leaving(Message, frozen=True, kw_only=True):
    """Request of a node to leave gracefully (SIGTERM, a spot notice): plan without it at a step boundary."""

    reason: str


class SnapshotCompleted(Message, frozen=True, kw_only=True):
    """Report that every shard of this node is complete in host memory, and in its replica peer's memory if it
    has one.
    """

    generation: Counter
    step: Counter
    vote: Vote
    size_bytes: Counter
    copy_s: Duration
    """The longest copying time of a device, in seconds."""
    stall_s: Duration
    """Time that training waited for the copying, in seconds."""


class RestoreFailed(Message, frozen=True, kw_only=True):
    """Report that this node cannot carry out ``Resume.restore``."""

    generation: Counter
    detail: str
    bad: tuple[str, ...] = ()
    """Nodes whose shards are unavailable or corrupt; empty: the cause is on this node."""
    corrupt: bool = False
    """Whether the checkpoint is at fault: a byte differs from what was written, or a file is missing."""


class LayersPersisted(Message, frozen=True, kw_only=True):
    """Report that this node's share of a checkpoint is on the disk."""

    job_id: str
    attempt: str
    step: Counter
    layers: tuple[LayerFile, ...]
    took_s: Duration


class PersistFailed(Message, frozen=True, kw_only=True):
    """Report that this node's share of a checkpoint cannot be written. What it wrote does not count."""

    job_id: str
    attempt: str
    step: Counter
    detail: str


class HealthChecked(Message, frozen=True, kw_only=True):
    """Report of a health check that has ended. A node that has to pass it before it may take part sends it
    before ``Prepared``.
    """

    report: HealthReport


Signal = (
    Hello
    | Heartbeat
    | HealthChecked
    | Prepared
    | Quiesced
    | Resumed
    | Stepped
    | TrainerLost
    | PeerSuspected
    | OptimizerReplicaDiverged
    | ReplicaDigests
    | Finished
    | Leaving
    | SnapshotStarted
    | SnapshotCompleted
    | SnapshotFailed
    | RestoreFailed
    | LayersPersisted
    | PersistFailed
)

# --- coordinator → node: commands --------------------------------------------------------------


class RequestHello(Message, frozen=True, kw_only=True):
    """Request to send Hello again: a coordinator started, or it does not know the node."""


class Prepare(Message, frozen=True, kw_only=True):
    """Order to build this job in the node's trainers, starting them if needed. The node answers ``Prepared``."""

    job: Job
    profile: bool
    """Whether the node also measures the model and sends the profile."""


class Resume(Message, frozen=True, kw_only=True):
    """Order to train under ``plan`` from ``step`` on. A device whose report said ready first rolls forward to
    ``step``.

    ``vote`` is that of ``step`` (``None`` at step 0). ``hosts`` maps each planned node to the address at
    which its trainers are reached; ``rendezvous`` is host:port of the server through which they meet.
    """

    generation: Counter
    job_id: str
    step: Counter
    vote: Vote | None
    plan: Plan
    hosts: dict[str, str]
    rendezvous: str
    lineage: Counter = 0
    """Generation of the job's last rollback; 0: none. A trainer of another lineage drops its state first."""
    protection: str = "none"
    """Protection scheme of this generation's snapshots."""
    restore: Restore | None = None
    """Source of the state of ``step``; ``None``: the devices that hold it."""
    held_parts: tuple[HeldPart, ...] = ()
    """Parts that each planned device holds (ZeRO-1, without ``restore``)."""
    replica_peers: dict[str, ReplicaPeer] = field(default_factory=dict)
    """Replica peer of each node that has one: it holds a copy of that node's part of this generation's
    snapshots.
    """
    skipped_batches: tuple[int, ...] = ()
    """Batches that the sample order leaves out, ascending."""
    evaluated: Counter = 0
    """The newest step whose evaluation was reported. If the state after ``step`` is due for evaluation and was
    not reported, all ranks evaluate it first; they agree on it because all receive this number.
    """


class RequestSteps(Message, frozen=True, kw_only=True):
    """Request to send ``Stepped`` again for the committed steps from ``first`` to ``last``, which the
    coordinator missed.
    """

    first: Counter
    last: Counter


class Stop(Message, frozen=True, kw_only=True):
    """Order to end the trainers: the job is over (finished, failed, or stopped by a user)."""

    job_id: str
    reason: str
    failed: bool = False
    """Whether the job failed, in which case its snapshots stay."""


class Fence(Message, frozen=True, kw_only=True):
    """Notice that this incarnation is fenced: the node ends its trainers at once and returns under a new
    incarnation.
    """

    reason: str


class Reject(Message, frozen=True, kw_only=True):
    """Notice that the node may not join: another node of its name is alive, or it has the wrong number of
    devices. It tries again later.
    """

    reason: str


class Release(Message, frozen=True, kw_only=True):
    """Notice to a drained or leaving node that it holds nothing the job needs and may go."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Order to let all ranks take a snapshot after the step in flight. It goes to the node of rank 0; after
    the last step it goes to all nodes.
    """

    generation: Counter
    after_step: Counter
    """The newest committed step when this was ordered, so that a node does not obey one order twice."""


class RetainSnapshot(Message, frozen=True, kw_only=True):
    """Notice that the snapshot of ``step`` is complete everywhere: retain it, and release older ones except
    ``pinned``.
    """

    job_id: str
    step: Counter
    pinned: Counter = 0
    """Step of a snapshot that is being persisted; 0: none."""
    lineage: Counter = 0
    """Lineage of the coordinator. A rollback may have gone to an earlier step than a node retains."""
    restore: Restore | None = None
    """Its parts, for repairs; ``None``: unchanged."""


class Persist(Message, frozen=True, kw_only=True):
    """Order to write these layers of a retained snapshot into the draft ``attempt`` of a persistent
    checkpoint.

    The node answers each attempt once with LayersPersisted or PersistFailed, however often this message
    arrives.
    """

    job_id: str
    job_name: str
    url: str
    attempt: str
    record: Snapshot
    layers: tuple[int, ...]
    """Layers that this node writes."""
    sources: dict[str, str]
    """``Restore.sources``"""


class CancelPersist(Message, frozen=True, kw_only=True):
    """Notice that the attempt was abandoned: write no more of it."""

    job_id: str
    attempt: str


class CheckHealth(Message, frozen=True, kw_only=True):
    """Order to test the devices, and the links to these peers. A node that trains, or that runs a check
    already, ignores it.
    """

    peers: tuple[ReplicaPeer, ...] = ()


Command = (
    RequestHello
    | CheckHealth
    | Prepare
    | Quiesce
    | Resume
    | RequestSteps
    | Stop
    | Fence
    | Reject
    | Release
    | TakeSnapshot
    | RetainSnapshot
    | Persist
    | CancelPersist
)

# --- envelopes ----------------------------------------------------------------------------------


class FromNode(Struct, frozen=True, kw_only=True):
    node: str
    incarnation: int
    signal: Signal


class ToNode(Struct, frozen=True, kw_only=True):
    node: str
    incarnation: int
    command: Command
    cause: str
    """Cause id of the event that led to this command (``ftd story``)."""


class ToNodes(Struct, frozen=True, kw_only=True):
    """A command that is equal for several nodes. All nodes of the cluster receive it; those named obey it."""

    receivers: Mapping[str, int]
    """Name of each addressed node → the incarnation that is addressed."""
    command: Command
    cause: str

    def addressed(self, node: str, incarnation: int) -> ToNode | None:
        """Return the command addressed to this incarnation alone, or ``None`` if it is not addressed."""
        if self.receivers.get(node) != incarnation:
            return None
        return ToNode(node=node, incarnation=incarnation, command=self.command, cause=self.cause)
