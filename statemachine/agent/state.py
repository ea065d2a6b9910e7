"""State of a node's agent, and operations that its modules share. ``machine`` has the machine itself."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from planner.values import ModelProfile
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
    BuildProgress,
    CommittedStep,
    DeviceReport,
    HealthReport,
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
LATE_S = 10.0
"""Longest time by which an order to prepare a job is late that was sent before the job was stopped."""


class TrainerPhase(StrEnum):
    """Phase in the life of the trainer of one device."""

    DOWN = "DOWN"
    """There is no process."""
    STARTING = "STARTING"
    """The process was forked and has not connected yet."""
    UP = "UP"
    """The process has connected and has no job."""
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    QUIESCING = "QUIESCING"
    QUIESCED = "QUIESCED"
    PARKED = "PARKED"
    """The trainer has no rank in the plan: it holds its state and waits."""
    RESUMING = "RESUMING"
    TRAINING = "TRAINING"
    DONE = "DONE"


_P = TrainerPhase
BUILT = frozenset({_P.PREPARED, _P.QUIESCING, _P.QUIESCED, _P.PARKED, _P.RESUMING, _P.TRAINING, _P.DONE})
NOT_BUILT = frozenset({_P.STARTING, _P.UP, _P.PREPARING})
IN_GROUP = frozenset({_P.RESUMING, _P.TRAINING, _P.DONE})


@dataclass(slots=True, kw_only=True)
class TrainerRecord:
    device: int
    phase: TrainerPhase = TrainerPhase.DOWN
    pid: int | None = None
    state: TrainerQuiesced | None = None
    """Its answer to the last Quiesce …"""
    resumed: Resumed | None = None
    """… to the Resume after it …"""
    finished: Finished | None = None
    """… and its report of the end."""
    computed_ms: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_FOR_SPEED))
    """Computing times of one microbatch in the last steps of the current group."""
    # --- hang detection ---
    heartbeat_at: float = 0.0
    starved_s: float = 0.0
    """Time since its last heartbeat for which it was runnable but did not run; it does not count."""
    progress: int = -1
    progress_at: float = 0.0
    """Time at which it last made progress or was waiting."""
    reading: bool = False
    """Whether the trainer read samples of the data set, as last reported."""
    build_progress: BuildProgress | None = None
    """Progress before it was prepared, as last reported."""

    @property
    def alive(self) -> bool:
        """Return whether its process is known to be alive."""
        return self.phase not in (TrainerPhase.DOWN, TrainerPhase.STARTING)

    def report(self, resumed: int) -> DeviceReport | None:
        """Return its state as the node reports it, or ``None`` if it has not quiesced.

        :param resumed: generation of the last Resume.
        """
        if self.state is None:
            return None
        fields = {name: getattr(self.state, name) for name in TrainerState.__struct_fields__}
        return DeviceReport(device=self.device, resumed=resumed, **fields)


@dataclass(slots=True, kw_only=True)
class LocalSnapshot:
    """The newest snapshot that the current trainers began."""

    started: SnapshotStarted
    shards: dict[int, ShardWritten] = field(default_factory=dict)
    written: SnapshotCompleted | None = None
    """Snapshot that is complete in this node's own memory; it is sent once the replica peer has a copy, too."""
    completed: SnapshotCompleted | None = None


@dataclass(slots=True, kw_only=True)
class Agent:
    name: str
    timing: Timing
    incarnation: int = 0
    facts: NodeFacts = field(default_factory=lambda: NodeFacts(devices=0, host="", rendezvous_port=0))
    trainers: list[TrainerRecord] = field(default_factory=list)
    connected: bool = False
    active: bool = False
    """Whether the agent is between AgentStarted and a fence or the exit."""
    rejected: bool = False
    leaving: str | None = None
    state: NodeState = NodeState.HEALTHY
    reason: str = "started"
    job: Job | None = None
    past_jobs: dict[str, float] = field(default_factory=dict)
    """Jobs that are over, with the time at which this node stopped each."""
    wants_profile: bool = False
    profile: ModelProfile | None = None
    trainer_lost: TrainerLost | None = None
    """Reason why this node is UNHEALTHY."""
    failures: int = 0
    """Trainer failures since a step was last committed."""
    build_failures: int = 0
    """Trainers that ended while they built the model, since one last succeeded."""
    generation: int = 0
    """The highest generation obeyed."""
    peer_suspected: PeerSuspected | None = None
    """Report that a connection of the current group broke. The step that was past its VOTE may still commit;
    later steps prove a false alarm.
    """
    suspected_at_step: int = 0
    restore_failed: RestoreFailed | None = None
    """Report that the state of the current generation cannot be restored here."""
    resume: Resume | None = None
    """The last Resume obeyed by the current trainers."""
    lineage: int = 0
    """Lineage of the last Resume obeyed, to which ``history`` belongs."""
    stepping: bool = False
    """Whether the current group has committed a step, so that hangs can be distinguished from work."""
    committed: CommittedStep | None = None
    """Newest step that the current trainers are known to have committed."""
    history: dict[int, CommittedStep] = field(default_factory=dict)
    """Committed steps by number, oldest first, at most ``steps_remembered``."""
    unsent: list[CommittedStep] = field(default_factory=list)
    step_s: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_FOR_MEDIAN))
    snapshots: list[HeldSnapshot] = field(default_factory=list)
    """Snapshots that are complete in this node's memory."""
    retained_step: int = 0
    """Step of the current job's snapshot that is complete everywhere, as last ordered …"""
    retained_lineage: int = 0
    """… in this lineage."""
    corrupt_step: int = 0
    """Step of the snapshot that is corrupt and cannot be repaired here; 0: none."""
    repairs: int = 0
    """Number of times that bytes of a snapshot had changed in this node's memory, and were repaired."""
    pinned_step: int = 0
    """Step of a snapshot that is retained too, while it is persisted; 0: none."""
    cancelled_attempt: str = ""
    """Attempt at a checkpoint that was cancelled before its order arrived."""
    persist_order: Persist | None = None
    """The last order to write a part of a persistent checkpoint."""
    persist_answer: LayersPersisted | PersistFailed | None = None
    """The answer to that order."""
    last_snapshot_order: tuple[int, int] = (0, 0)
    """(generation, after_step) of the last TakeSnapshot obeyed."""
    local_snapshot: LocalSnapshot | None = None
    snapshot_failed: SnapshotFailed | None = None
    """The newest snapshot of the current group, if it failed here."""
    check_number: int = 0
    """Number of the newest health check, among those of the daemon."""
    checking: bool = False
    """Whether it is under way."""
    check_awaited: bool = False
    """Whether this node counts as prepared only when it has ended."""
    check_ordered: bool = False
    """Whether the coordinator ordered it."""
    health: HealthReport | None = None
    """Result of the last health check of this incarnation that has ended, with the wrong results of those before
    it that the coordinator may not know.
    """
    ended_pids: dict[int, int] = field(default_factory=dict)
    """Device → pid of the last of its processes that this agent ended: late messages about it do not count."""
    ignored: Counter[str] = field(default_factory=Counter)

    # --- current step ---------
    at: float = 0.0
    cause: str = ""
    due: dict[str, float] = field(default_factory=dict)
    out: list[Effect] = field(default_factory=list)

    def note_past(self, job: Job) -> None:
        """Note that a job is over, and forget those of which no late order can come any more."""
        self.past_jobs = {one: at for one, at in self.past_jobs.items() if self.at - at < LATE_S}
        self.past_jobs[job.job_id] = self.at

    def is_past(self, job: Job) -> bool:
        """Return whether an order to prepare this job is a late one. If it is repeated for long, the coordinator
        does not know that the job was over, since the journals that said so are lost: it is to go on.
        """
        return self.at - self.past_jobs.get(job.job_id, -math.inf) < LATE_S

    # --- derived state ---

    @property
    def built(self) -> bool:
        """Return whether every trainer has built the job, and no health check must end first."""
        return (
            self.job is not None
            and bool(self.trainers)
            and all(t.phase in BUILT for t in self.trainers)
            and not self.check_awaited
        )

    @property
    def training(self) -> bool:
        return any(trainer.phase in IN_GROUP for trainer in self.trainers)

    @property
    def quiesced(self) -> bool:
        """Return whether every trainer has reported and waits for a Resume."""
        return bool(self.trainers) and all(t.phase is TrainerPhase.QUIESCED for t in self.trainers)

    @property
    def activity(self) -> NodeActivity:
        """Return the node's activity, a summary of the phases of all trainers."""
        if self.job is None:
            return NodeActivity.NONE
        if not self.built:
            return NodeActivity.BUILDING
        phases = {trainer.phase for trainer in self.trainers}
        # The first of these phases that any trainer is in tells what the node as a whole still does.
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
        """Return this node's devices that have a rank in the plan."""
        return [device.index for device in resume.plan.devices if device.node == self.name]

    def microbatch_ms(self) -> tuple[float, ...] | None:
        """Return ``Heartbeat.microbatch_ms``: medians, so that one slow step does not count."""
        if self.resume is None or self.resume.generation != self.generation:
            return None
        medians = tuple(
            round(median(trainer.computed_ms), 3) if len(trainer.computed_ms) >= FEWEST_FOR_SPEED else 0.0
            for trainer in self.trainers
        )
        return medians if any(medians) else None

    # --- operations ---

    def send(self, signal: Signal) -> None:
        self.out.append(SendSignal(cause=self.cause, signal=signal))

    def ignore(self, why: str) -> None:
        self.ignored[why] += 1
        self.out.append(
            EmitEvent(
                cause=self.cause,
                name="MessageIgnored",
                reason=why,
                node=self.name,
                generation=self.generation,
                step=self.committed.step if self.committed is not None else None,
                details={"why": why, "count": self.ignored[why]},
            )
        )

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
        """End every trainer; what they held is lost."""
        for trainer in self.trainers:
            if trainer.phase is not TrainerPhase.DOWN:
                self.out.append(KillTrainer(cause=self.cause, device=trainer.device, grace_s=grace_s))
            if trainer.pid is not None:
                self.ended_pids[trainer.device] = trainer.pid
            trainer.phase, trainer.pid = TrainerPhase.DOWN, None
            trainer.state = trainer.resumed = trainer.finished = None
            trainer.reading = False
        if self.resume is not None:
            # Perhaps the whole group dies before its steps were reported; then others redo them with
            # different rounding.
            self.drop_history_after(self.resume.step)
        self.resume = self.committed = self.peer_suspected = self.local_snapshot = None
        self.restore_failed = self.snapshot_failed = None
        self.stepping = False
        self.unsent.clear()
        self.cancel_timer(STEPPED)
        self.cancel_timer(RESTART)

    def drop_history_after(self, step: int) -> None:
        """Remove later steps, which may have been undone, from the history."""
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
