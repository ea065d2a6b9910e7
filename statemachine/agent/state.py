"""What a node's agent knows, and the verbs its modules share. ``agent`` is the machine itself."""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from planner.values import Device, ModelProfile
from statemachine.effects import (
    CancelTimer,
    Effect,
    EmitEvent,
    KillTrainer,
    PublishNode,
    SendSignal,
    SetTimer,
    StartTrainer,
)
from statemachine.messages.cluster import (
    LayersPersisted,
    Persist,
    PersistFailed,
    RestoreFailed,
    Resume,
    Signal,
    SnapshotCompleted,
    TrainerLost,
)
from statemachine.messages.common import Finished, PeerSuspected, Resumed, SnapshotFailed, SnapshotStarted
from statemachine.messages.trainer import ShardWritten, TrainerQuiesced
from statemachine.messages.values import (
    CommittedStep,
    DeviceReport,
    HeldSnapshot,
    Job,
    NodeActivity,
    NodeFacts,
    NodeState,
    TrainerState,
)
from statemachine.timing import Timing

HEARTBEAT = "heartbeat"
HELLO = "hello"
STEPPED = "stepped"
HANG_CHECK = "watch"
RESTART = "restart"
LEAVE = "leave"

PERIODIC = frozenset({HEARTBEAT, HELLO, HANG_CHECK})
STEPS_FOR_MEDIAN = 21
STEPS_FOR_SPEED = 9
FEWEST_FOR_SPEED = 3


class TrainerPhase(StrEnum):
    """Where the trainer of one device is in its life."""

    DOWN = "DOWN"
    """No process."""
    STARTING = "STARTING"
    """Forked; not connected yet."""
    UP = "UP"
    """Connected; has no job."""
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    QUIESCING = "QUIESCING"
    QUIESCED = "QUIESCED"
    PARKED = "PARKED"
    """Resumed without a rank: keeps its state and waits."""
    RESUMING = "RESUMING"
    TRAINING = "TRAINING"
    DONE = "DONE"


_P = TrainerPhase
BUILT = frozenset({_P.PREPARED, _P.QUIESCING, _P.QUIESCED, _P.PARKED, _P.RESUMING, _P.TRAINING, _P.DONE})
NOT_BUILT = frozenset({_P.STARTING, _P.UP, _P.PREPARING})
IN_GROUP = frozenset({_P.RESUMING, _P.TRAINING, _P.DONE})


@dataclass(slots=True, kw_only=True)
class Trainer:
    device: int
    phase: TrainerPhase = TrainerPhase.DOWN
    pid: int | None = None
    state: TrainerQuiesced | None = None
    """Its answer to the last Quiesce …"""
    resumed: Resumed | None = None
    """… to the Resume after that …"""
    finished: Finished | None = None
    """… and its report of the end."""
    computed_ms: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_FOR_SPEED))
    """Computing one microbatch, in the last steps of the present group."""
    # --- hang detection ---
    heartbeat_at: float = 0.0
    starved_s: float = 0.0
    """Since its last beat it could not run for so long, which does not count."""
    progress: int = -1
    progress_at: float = 0.0
    """When it last made progress, or was waiting."""
    reading: bool = False
    """Samples of the data set, when last heard of."""
    build_progress: str = ""
    """What it did before it was prepared, when last heard of."""

    @property
    def alive(self) -> bool:
        """Whether its process is known to live."""
        return self.phase not in (TrainerPhase.DOWN, TrainerPhase.STARTING)

    @property
    def report(self) -> DeviceReport | None:
        """Its state as the node reports it; ``None``: it has not quiesced."""
        if self.state is None:
            return None
        fields = {name: getattr(self.state, name) for name in TrainerState.__struct_fields__}
        return DeviceReport(device=self.device, **fields)


@dataclass(slots=True, kw_only=True)
class LocalSnapshot:
    """The newest snapshot that the trainers living now began."""

    started: SnapshotStarted
    shards: dict[int, ShardWritten] = field(default_factory=dict)
    written: SnapshotCompleted | None = None
    """Complete in this node's own memory; what to say once the buddy has it, too."""
    completed: SnapshotCompleted | None = None


@dataclass(slots=True, kw_only=True)
class Agent:
    name: str
    timing: Timing
    incarnation: int = 0
    facts: NodeFacts = field(default_factory=lambda: NodeFacts(devices=0, host="", rendezvous_port=0))
    trainers: list[Trainer] = field(default_factory=list)
    connected: bool = False
    active: bool = False
    """Between AgentStarted and a fence or the exit."""
    rejected: bool = False
    leaving: str | None = None
    state: NodeState = NodeState.HEALTHY
    reason: str = "started"
    job: Job | None = None
    past_jobs: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    """Jobs that are over: a Prepare for one of them is a late duplicate."""
    wants_profile: bool = False
    profile: ModelProfile | None = None
    trainer_lost: TrainerLost | None = None
    """Why this node is UNHEALTHY."""
    failures: int = 0
    """Trainer failures since a step was last committed."""
    build_failures: int = 0
    """Trainers that ended while they built the model, since one had built it."""
    generation: int = 0
    """The highest obeyed."""
    peer_suspected: PeerSuspected | None = None
    """A connection of the present group broke. The step that was past its VOTE may still commit; more
    steps say that it was a false alarm."""
    suspected_at_step: int = 0
    restore_failed: RestoreFailed | None = None
    """The state of the present generation cannot be restored here."""
    resume: Resume | None = None
    """The last Resume obeyed by the trainers that live now."""
    lineage: int = 0
    """Of the last Resume obeyed: ``history`` is of that past."""
    stepping: bool = False
    """A step of the present group was committed: hangs can be told from work."""
    committed: CommittedStep | None = None
    """Newest step that the trainers that live now are known to have committed."""
    history: dict[int, CommittedStep] = field(default_factory=dict)
    """Committed steps by number, oldest first, at most ``steps_remembered``."""
    unsent: list[CommittedStep] = field(default_factory=list)
    step_s: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_FOR_MEDIAN))
    snapshots: list[HeldSnapshot] = field(default_factory=list)
    """Complete in this node's memory."""
    retained_step: int = 0
    """Step of the snapshot of the present job that is complete everywhere, as last told …"""
    retained_lineage: int = 0
    """… in this lineage."""
    corrupt_step: int = 0
    """Step of the one that cannot be repaired here; 0: of none."""
    pinned_step: int = 0
    """Step of one that stays besides, while it is persisted; 0: none."""
    cancelled_attempt: str = ""
    """Attempt at a checkpoint that is over, and of which no order came."""
    persist_order: Persist | None = None
    """The last order to write a part of a persistent checkpoint."""
    persist_answer: LayersPersisted | PersistFailed | None = None
    """The answer to it."""
    last_snapshot_order: tuple[int, int] = (0, 0)
    """(generation, behind) of the last Snap obeyed."""
    local_snapshot: LocalSnapshot | None = None
    snapshot_failed: SnapshotFailed | None = None
    """The newest snapshot of the present group, where it failed here."""
    ended_pids: set[int] = field(default_factory=set)
    """Process ids that this agent ended: late news of them means nothing."""
    ignored: Counter[str] = field(default_factory=Counter)

    # --- the step under way ---
    at: float = 0.0
    cause: str = ""
    due: dict[str, float] = field(default_factory=dict)
    out: list[Effect] = field(default_factory=list)

    # --- facts ---

    @property
    def built(self) -> bool:
        """Every trainer has built the job."""
        return self.job is not None and bool(self.trainers) and all(t.phase in BUILT for t in self.trainers)

    @property
    def training(self) -> bool:
        return any(trainer.phase in IN_GROUP for trainer in self.trainers)

    @property
    def quiesced(self) -> bool:
        """Every trainer has reported and waits for a Resume."""
        return bool(self.trainers) and all(t.phase is TrainerPhase.QUIESCED for t in self.trainers)

    @property
    def activity(self) -> NodeActivity:
        """Summarise the phases of all trainers."""
        if self.job is None:
            return NodeActivity.NONE
        if not self.built:
            return NodeActivity.BUILDING
        phases = {trainer.phase for trainer in self.trainers}
        # The first of these that any trainer is in says what the node as a whole still does.
        for phase, activity in (
            (TrainerPhase.QUIESCING, NodeActivity.QUIESCING),
            (TrainerPhase.QUIESCED, NodeActivity.QUIESCED),
            (TrainerPhase.RESUMING, NodeActivity.RESUMING),
            (TrainerPhase.TRAINING, NodeActivity.TRAINING),
            (TrainerPhase.DONE, NodeActivity.FINISHED),
            (TrainerPhase.PARKED, NodeActivity.IDLE),
        ):
            if phase in phases:
                return activity
        return NodeActivity.PREPARED

    def ranked_devices(self, resume: Resume) -> list[int]:
        """This node's devices that have a rank in the plan."""
        return [device.index for device in resume.plan.devices if device.node == self.name]

    def has_rank_zero(self, resume: Resume) -> bool:
        """Rank 0 is here: this node reports the steps."""
        first: Device = resume.plan.devices[0]
        return first.node == self.name

    def microbatch_ms(self) -> tuple[float, ...] | None:
        """``Heartbeat.microbatch_ms``. Medians: a hiccup of one step is no slowness."""
        if self.resume is None or self.resume.generation != self.generation:
            return None
        medians = tuple(
            round(median(trainer.computed_ms), 3) if len(trainer.computed_ms) >= FEWEST_FOR_SPEED else 0.0
            for trainer in self.trainers
        )
        return medians if any(medians) else None

    # --- verbs ---

    def send(self, signal: Signal) -> None:
        self.out.append(SendSignal(cause=self.cause, signal=signal))

    def emit(self, name: str, reason: str, /, **details: Any) -> None:
        self.out.append(
            EmitEvent(
                cause=self.cause,
                name=name,
                reason=reason,
                node=self.name,
                generation=self.generation,
                step=self.committed.step if self.committed is not None else None,
                details=details,
            )
        )

    def ignore(self, why: str) -> None:
        self.ignored[why] += 1
        self.emit("MessageIgnored", why, why=why, count=self.ignored[why])

    def publish(self, state: NodeState, reason: str) -> None:
        self.state, self.reason = state, reason
        self.out.append(
            PublishNode(
                cause=self.cause,
                state=state,
                generation=self.generation,
                step=self.committed.step if self.committed is not None else 0,
                reason=reason,
            )
        )

    def set_timer(self, name: str, delay_s: float) -> None:
        self.due[name] = self.at + delay_s
        cause = "clock" if name in PERIODIC else self.cause
        self.out.append(SetTimer(cause=cause, name=name, delay_s=delay_s))

    def cancel_timer(self, name: str) -> None:
        if self.due.pop(name, None) is not None:
            self.out.append(CancelTimer(cause=self.cause, name=name))

    def kill_trainers(self, grace_s: float = 0.0) -> None:
        """End every trainer; what they held is gone."""
        for trainer in self.trainers:
            if trainer.phase is not TrainerPhase.DOWN:
                self.out.append(KillTrainer(cause=self.cause, device=trainer.device, grace_s=grace_s))
            if trainer.pid is not None:
                self.ended_pids.add(trainer.pid)
            trainer.phase, trainer.pid = TrainerPhase.DOWN, None
            trainer.state = trainer.resumed = trainer.finished = None
            trainer.reading = False
        if self.resume is not None:
            # Perhaps the whole group dies and nobody heard of its steps; then others redo them, with
            # other rounding.
            self.drop_history_after(self.resume.step)
        self.resume = self.committed = self.peer_suspected = self.local_snapshot = None
        self.restore_failed = self.snapshot_failed = None
        self.stepping = False
        self.unsent.clear()
        self.cancel_timer(STEPPED)
        self.cancel_timer(RESTART)

    def drop_history_after(self, step: int) -> None:
        """Steps that may have been undone are not history."""
        for later in [number for number in self.history if number > step]:
            del self.history[later]

    def start_trainers(self) -> None:
        """Start a trainer for every device that has none."""
        for trainer in self.trainers:
            if trainer.phase is TrainerPhase.DOWN:
                trainer.phase = TrainerPhase.STARTING
                trainer.heartbeat_at = trainer.progress_at = self.at
                trainer.progress = -1
                self.out.append(StartTrainer(cause=self.cause, device=trainer.device))
        if HANG_CHECK not in self.due:
            self.set_timer(HANG_CHECK, self.timing.hang_check_s)
