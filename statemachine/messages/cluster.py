"""Messages between the coordinator and the nodes: signals one way, commands the other, and their envelopes.

An envelope carries the node's name and incarnation: from a node its own, to a node the one that the coordinator
means. A node that receives a command for another incarnation ignores, counts and logs it; every node receives a
command to several nodes (``ToNodes``), and nodes that are not listed ignore it. The codec and the topics are in
``ftd.transport.wire``.
"""

from collections.abc import Mapping

from msgspec import Struct, field

from planner.values import Plan
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
from statemachine.messages.values import (
    CommittedStep,
    DeviceReport,
    FailureCause,
    HeldPart,
    HeldSnapshot,
    Job,
    LayerFile,
    NodeActivity,
    NodeFacts,
    ReplicaPeer,
    Restore,
    Snapshot,
    Vote,
)

# --- node → coordinator: signals ---------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """The node is here: on each (re)connection to the broker and when a coordinator asks (``RequestHello``)."""

    facts: NodeFacts
    job_id: str | None
    prepared: bool
    """Every trainer of this node has built the job ``job_id``."""
    generation: int
    """Highest generation the node has obeyed; 0 before the first."""
    training: bool
    """Its trainers are running under ``generation`` (not quiesced, not idle)."""
    quiesced: bool = False
    """They stopped under ``generation`` and wait for its Resume. Neither: they are fresh, or idle."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    """What its memory holds complete, also of trainers and daemons that are gone."""


class Acknowledgement(Struct, frozen=True, kw_only=True):
    """Which orders have reached a node, and which reports it has sent.

    The coordinator compares it with what it ordered and received, and so finds every message that was lost
    (``statemachine.cluster.acknowledgement``).
    """

    activity: NodeActivity
    job_id: str | None
    """The job that its trainers build or train."""
    leaving: bool = False
    """It has sent Leaving."""
    suspects_peer: bool = False
    """It has sent PeerSuspected, and no commit has disproved it."""
    restore_failed: bool = False
    """It has sent RestoreFailed under the heartbeat's generation."""
    snap_after: int = 0
    """``Snap.behind`` of the newest order obeyed under the heartbeat's generation; 0: none."""
    snapshot_reported: int = 0
    """Step of the snapshot for which SnapshotCompleted or SnapshotFailed was sent last; 0: none."""
    persist_attempt: str = ""
    """Attempt of the last Persist or CancelPersist received; empty: none."""
    persist_reported: bool = False
    """LayersPersisted or PersistFailed was sent for it."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """I am alive; every ``heartbeat_s``. Carries the newest committed step it knows of."""

    generation: int
    committed: CommittedStep | None
    microbatch_ms: tuple[float, ...] | None = None
    """For each device: median computing time of a microbatch under ``generation``; 0, ``None``: unknown."""
    lineage: int = 0
    """That of ``committed``: of the last Resume obeyed."""
    retained_step: int = 0
    """Step of the snapshot of its job that it was last told to keep (``RetainSnapshot``)."""
    corrupt_step: int = 0
    """Step of the one of which bytes changed here that cannot be made again; 0: of none."""
    build_progress: str = ""
    """What a trainer here does to build the job, in words; empty when all have built it."""
    acknowledgement: Acknowledgement | None = None
    """``None``: the sender makes no statement."""


class Quiesced(Message, frozen=True, kw_only=True):
    """Every trainer stopped under ``generation``; one report per device that is alive and prepared."""

    generation: int
    reports: tuple[DeviceReport, ...]


class Stepped(Message, frozen=True, kw_only=True):
    """Steps committed since the last such message, oldest first. Sent by the node of rank 0."""

    generation: int
    steps: tuple[CommittedStep, ...]
    step_s: float
    """Duration of the newest step."""
    requested_first: int | None = None
    """In an answer to ``RequestSteps``: its ``first``. ``steps`` may then be empty: not known here."""
    lineage: int = 0
    """Of the last Resume obeyed."""


class TrainerLost(Message, frozen=True, kw_only=True):
    """A trainer of this node failed; the node is UNHEALTHY until it says ``Prepared`` again."""

    generation: int
    device: int
    cause: FailureCause
    detail: str
    """For people: exit status or exception, and the tail of its stderr."""


class Leaving(Message, frozen=True, kw_only=True):
    """The node wants to leave gracefully (SIGTERM, a spot notice): replan without it at a boundary."""

    reason: str


class SnapshotCompleted(Message, frozen=True, kw_only=True):
    """Every shard of this node is complete in host memory, and in its buddy's where it has one."""

    generation: int
    step: int
    vote: Vote
    size_bytes: int
    copy_s: float
    """The longest of a device."""
    stall_s: float
    """How long training waited for the copying."""


class RestoreFailed(Message, frozen=True, kw_only=True):
    """A ``Resume.restore`` cannot be done here."""

    generation: int
    detail: str
    bad: tuple[str, ...] = ()
    """Nodes whose shards cannot be had or are damaged; none: it is this node's own fault."""
    damaged: bool = False
    """It is the checkpoint's fault: a byte is not what was written, or a file is gone."""


class LayersPersisted(Message, frozen=True, kw_only=True):
    """This node's share of a checkpoint is on the disk."""

    job_id: str
    attempt: str
    step: int
    layers: tuple[LayerFile, ...]
    took_s: float


class PersistFailed(Message, frozen=True, kw_only=True):
    """This node's share of a checkpoint cannot be written; what it wrote counts for nothing."""

    job_id: str
    attempt: str
    step: int
    detail: str


Signal = (
    Hello
    | Heartbeat
    | Prepared
    | Quiesced
    | Resumed
    | Stepped
    | TrainerLost
    | PeerSuspected
    | OptimizerReplicaDiverged
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
    """Say Hello again: a coordinator started, or does not know you."""


class Prepare(Message, frozen=True, kw_only=True):
    """Build this job in your trainers (start them where needed); answer ``Prepared``."""

    job: Job
    profile: bool
    """Measure the model and send the profile along."""


class Resume(Message, frozen=True, kw_only=True):
    """Train under ``plan`` from ``step`` on: roll forward to ``step`` first where a report said ready.

    ``vote`` is that of ``step`` (``None`` at step 0). ``hosts`` maps each planned node to the address its
    trainers are reached at; ``rendezvous`` is host:port of the server they meet through.
    """

    generation: int
    job_id: str
    step: int
    vote: Vote | None
    plan: Plan
    hosts: dict[str, str]
    rendezvous: str
    lineage: int = 0
    """Generation of the job's last rollback; 0: none. Who is of another lineage drops its state first."""
    protection: str = "none"
    """Of this generation's snapshots."""
    restore: Restore | None = None
    """Where the state of ``step`` comes from; ``None``: from those who hold it."""
    held_parts: tuple[HeldPart, ...] = ()
    """Under ZeRO-1 and without ``restore``: who among the planned devices has what."""
    replica_peers: dict[str, ReplicaPeer] = field(default_factory=dict)
    """Node → who keeps a copy of its part of this generation's snapshots."""
    evaluated: int = 0
    """The newest step whose evaluation was reported. The state after ``step`` is evaluated first of all if that
    is due and not reported; all ranks agree on it, as all get this number."""


class RequestSteps(Message, frozen=True, kw_only=True):
    """Send ``TrainerStepped`` for these committed steps once more: they were missed (first … last)."""

    first: int
    last: int


class Stop(Message, frozen=True, kw_only=True):
    """End the trainers; the job is over (finished, failed, or stopped by a user)."""

    job_id: str
    reason: str
    failed: bool = False
    """Its snapshots stay."""


class Fence(Message, frozen=True, kw_only=True):
    """Your incarnation is out: end your trainers at once and come back under a new incarnation."""

    reason: str


class Reject(Message, frozen=True, kw_only=True):
    """You may not join (another node of your name is alive, wrong device count); try again later."""

    reason: str


class Release(Message, frozen=True, kw_only=True):
    """You hold nothing the job needs: a drained or leaving node may go."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Let everybody take a snapshot behind the step in flight. To rank 0's node; behind the last to all."""

    generation: int
    after_step: int
    """The newest committed step when this was ordered: a node obeys no order twice."""


class RetainSnapshot(Message, frozen=True, kw_only=True):
    """The snapshot of ``step`` is complete everywhere: keep it, release older ones but ``pinned``."""

    job_id: str
    step: int
    pinned: int = 0  # Step of one that is being persisted; 0: none.
    lineage: int = 0  # The coordinator's: a rollback may have gone behind what a node keeps.
    restore: Restore | None = None  # Its parts, to be repaired; ``None``: as said before.


class Persist(Message, frozen=True, kw_only=True):
    """Write these layers of a kept snapshot into the draft ``attempt`` of a persistent checkpoint.

    Answered by LayersPersisted or PersistFailed, once for an attempt however often this comes.
    """

    job_id: str
    job_name: str
    url: str
    attempt: str
    record: Snapshot
    layers: tuple[int, ...]
    """This node's share."""
    sources: dict[str, str]
    """``Restore.sources``"""


class CancelPersist(Message, frozen=True, kw_only=True):
    """The attempt was given up: write no more of it."""

    job_id: str
    attempt: str


Command = (
    RequestHello
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
    """Cause id of the event that made the coordinator say this (``ftd story``)."""


class ToNodes(Struct, frozen=True, kw_only=True):
    """A command that is equal for several nodes: all of the cluster hear it, those named obey it."""

    receivers: Mapping[str, int]
    """Name → the incarnation that is meant."""
    command: Command
    cause: str

    def addressed(self, node: str, incarnation: int) -> ToNode | None:
        """The command as this incarnation's own; ``None``: it is not for it."""
        if self.receivers.get(node) != incarnation:
            return None
        return ToNode(node=node, incarnation=incarnation, command=self.command, cause=self.cause)
