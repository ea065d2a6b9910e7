"""The run model: the one place where the event stream and the cluster's states are folded.

Pass each event to ``RunModel.on_event`` and each state to ``RunModel.on_state``. ``on_event`` returns the
event as a typed fact, or ``None`` if the event was seen before. The report, live view, dashboard, metrics,
chaos scenarios and the drivers of local clusters read the model and its facts.

Events may arrive twice (MQTT delivers at least once, and the journal repeats what the stream brought) and
out of order. The model therefore compares steps by their generation, and relates events to each other when
it is read, not when they arrive.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from ftd.observe.goodput import GoodputMeter
from statemachine.messages.values import RECOVERY_PHASES, MeasuredFrom

Json = Mapping[str, Any]

START = "start"
"""Cause of the first plan of a job."""
PROBLEMS = frozenset(
    {
        "TrainerLost",
        "NodeFenced",
        "NodeRejected",
        "NodeQuarantined",
        "RestoreFailed",
        "ReplicasDiverged",
        "OptimizerReplicaDiverged",
        "ShardCorrupted",
        "SnapshotsUnavailable",
        "CheckpointAbandoned",
        "CheckpointExportFailed",
        "CheckpointSkipped",
        "LoggingFailed",
        "MessageRejected",
        "StandbyIneligible",
        "TakeoverRejected",
    }
)
"""Events whose reason is listed among the failures of a run. Losses of nodes, pauses, rollbacks and the end of
the job are listed by themselves.
"""
FAILURE_CAUSES = frozenset({"node_lost", "trainer_lost", "connection_lost", "corruption"})
MAX_IDENTITIES = 20_000
"""Number of events that a bounded model remembers in order to recognise a second delivery."""
MAX_LOSSES = 32
"""Largest number of losses kept for one recovery; the newest ones stay."""


def is_failure(cause: str, rolled_back_steps: int) -> bool:
    """Return whether a recovery began with a failure: a loss, or state that had to come from a snapshot."""
    return cause in FAILURE_CAUSES or rolled_back_steps > 0


def mark_unreachable(state: Json, reason: str) -> dict[str, Any]:
    """Return the last published state of a cluster, marked as having no coordinator."""
    return {**state, "phase": "UNREACHABLE", "reason": reason, "leader": "", "standbys": [], "ineligible": {}}


def phases_ms(recovery: object) -> dict[str, float]:
    """Return the duration of each phase of a recovery by its name; they add up to ``total_ms``.

    :param recovery: ``RecoveryDetails``, or the same recovery in a report.
    """
    return {phase: getattr(recovery, field) or 0.0 for phase, field in RECOVERY_PHASES.items()}


# --- facts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """An event. Events that the model folds have subclasses with the details that readers need."""

    event: str
    at: float
    """Time of the event in seconds, on the reader's clock."""
    node: str | None
    generation: int | None
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmittedFact(Fact):
    job: str | None = None
    """The job's id."""
    name: str | None = None
    steps: int | None = None
    global_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEndedFact(Fact):
    """The end of a job: ``JobFinished``, ``JobFailed`` or ``JobStopped``."""

    checksum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommittedFact(Fact):
    step: int
    loss: float | None = None
    gradient_norm: float | None = None
    skipped: bool = False
    step_s: float | None = None
    learning_rate: float | None = None
    weight: float | None = None
    tokens_per_s: float | None = None
    fresh: bool = True
    """Whether the step is progress: neither it nor a later one was committed before, or a rollback undid
    that.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedFact(Fact):
    step: int
    loss: float | None = None
    weight: float | None = None
    metrics: Json | None = None
    took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineFact(Fact):
    """A node was set aside or readmitted: ``NodeQuarantined`` or ``NodeReadmitted``."""

    cause: str = ""
    readmit: str = ""
    """Command that readmits the node; empty if it was readmitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBackFact(Fact):
    """A rollback that undid all steps after ``to_step``."""

    to_step: int = 0
    undone_s: float = 0.0
    """Time that had been spent on the undone steps."""
    last_commit_at: float | None = None
    """Time at which the newest undone step was committed; ``None`` if none of them was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionFact(Fact):
    """A loss or a drain that became known: ``NodeLost``, ``TrainerLost`` or ``NodeDraining``."""

    how: str
    """Way in which the loss or drain was noticed. For a node: ``last_will``, ``silence``, …; for a trainer:
    the cause of its failure.
    """
    detected_at: float
    """Monotonic time at which the coordinator knew, which may be shortly before it published the event."""
    error: str = ""
    """The failure of a trainer in a line: the exception, or how the process ended."""
    detail: str = ""
    """Its traceback, or the end of its output."""
    host: str = ""
    log: str = ""
    """Command or file on the host with the full traceback; empty: there is none that lasts."""
    fault_at: float | None = None
    """Time of the fault that caused it, or of the last sign of life, as the event has it; ``None`` if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjectedFact(Fact):
    fault: str = "?"
    target: str | None = None
    device: int | None = None
    effective_at: float
    """Monotonic time at which the fault takes effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPausedFact(Fact):
    needed: int | None = None
    present: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEndedFact(Fact):
    """A snapshot or a persistent checkpoint that was completed or abandoned."""

    kind: Literal["snapshots", "checkpoints"]
    completed: bool
    size_bytes: int | None = None
    protection: str | None = None
    took_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStartedFact(Fact):
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStartedFact(Fact):
    device: int
    pid: int | None = None
    daemon_pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStartedFact(Fact):
    mode: str | None = None
    recovery_cause: str = ""
    """Cause of the recovery that it belongs to; ``start`` for the first plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEndedFact(Fact):
    """The end of a recovery phase: ``Quiesced``, ``PlanChosen`` or ``TrainingResumed``."""

    decision: str | None = None
    pipelines: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDetails:
    """Details of a completed recovery, as in ``ftd.transport.wire.event_details.RecoveryData``."""

    generation: int = 0
    cause: str = ""
    nodes: list[str] = field(default_factory=list)
    detected_how: str | None = None
    detected_at: float = 0.0
    began_at: float | None = None
    """Time of the fault or its best estimate; ``None`` if an older program measured it from the detection."""
    measured_from: MeasuredFrom = "detection"
    detected_ms: float | None = None
    waited_ms: float = 0.0
    quiesce_ms: float = 0.0
    plan_ms: float = 0.0
    state_ms: float = 0.0
    resume_ms: float = 0.0
    total_ms: float = 0.0
    rolled_back_steps: int = 0
    recomputed_steps: int = 0
    tier: str = ""
    bytes_moved: int = 0
    method: str | None = None
    reason: str | None = None
    generations_tried: int = 1
    step: int = 0
    pipelines_before: list[Json] = field(default_factory=list)
    pipelines_after: list[Json] = field(default_factory=list)

    @property
    def failure(self) -> bool:
        """Whether the recovery began with a failure."""
        return is_failure(self.cause, self.rolled_back_steps)

    @property
    def completed_at(self) -> float:
        """Monotonic time at which the next step was committed."""
        return (self.detected_at if self.began_at is None else self.began_at) + self.total_ms / 1000

    @property
    def is_start(self) -> bool:
        """Whether this is the first plan of a job, which takes the same path and is no recovery."""
        return self.cause == START


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimeline:
    """The phases of a recovery, as far as its events have shown them.

    Each phase ends with the event that begins the next one::

        detect    the fault … NodeLost, TrainerLost; known if these events say when the fault was
        wait      … GenerationStarted; only after a pause
        quiesce   … Quiesced: every survivor has stopped and reported
        plan      … PlanChosen
        state     … TrainingResumed: all ranks have met and hold their layers
        resume    … RecoveryCompleted: the next step is committed
    """

    generation: int | None
    attempts: int
    """Number of generations so far; each further failure before the first commit adds one."""
    step: int | None
    mode: str | None
    cause: str
    """Cause of the recovery, as ``RecoveryCompleted`` will have it; ``start`` for the first plan."""
    reason: str
    losses: tuple[DetectionFact, ...]
    phases: tuple[tuple[str, float, float | None], ...]
    """Name, begin and end of each phase; the end is ``None`` while the phase lasts."""
    decision: str | None = None
    plan: str | None = None
    pause_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCompletedFact(Fact):
    recovery: RecoveryDetails
    timeline: RecoveryTimeline | None = None
    """Timeline of the recovery; ``None`` if the model did not see its beginning."""


_FACTS: dict[str, type[Fact]] = {
    "JobSubmitted": JobSubmittedFact,
    **dict.fromkeys(("JobFinished", "JobFailed", "JobStopped"), JobEndedFact),
    "StepCommitted": StepCommittedFact,
    "Evaluated": EvaluatedFact,
    "RolledBack": RolledBackFact,
    **dict.fromkeys(("NodeLost", "TrainerLost", "NodeDraining"), DetectionFact),
    **dict.fromkeys(("NodeQuarantined", "NodeReadmitted"), QuarantineFact),
    "ChaosInjected": FaultInjectedFact,
    "ClusterPaused": ClusterPausedFact,
    **dict.fromkeys(
        ("SnapshotCompleted", "SnapshotAbandoned", "CheckpointCompleted", "CheckpointAbandoned"),
        SaveEndedFact,
    ),
    "CheckpointStarted": CheckpointStartedFact,
    "TrainerStarted": TrainerStartedFact,
    "GenerationStarted": GenerationStartedFact,
    **dict.fromkeys(("Quiesced", "PlanChosen", "TrainingResumed"), PhaseEndedFact),
    "RecoveryCompleted": RecoveryCompletedFact,
}
_ENVELOPE = {one.name for one in fields(Fact)}
_DETAILS = {kind: [one.name for one in fields(kind) if one.name not in _ENVELOPE] for kind in _FACTS.values()}
"""Details to copy from each kind of event; fact and event use the same names."""
_RECOVERY = {one.name for one in fields(RecoveryDetails)}
_NEXT_PHASE = {"Quiesced": "plan", "PlanChosen": "state", "TrainingResumed": "resume"}


def _fact_of(event: Json, at: float) -> Fact:
    """Return the fact that an event envelope states."""
    name, details = str(event.get("event")), event.get("details") or {}
    kind = _FACTS.get(name)
    content: dict[str, Any] = {key: event.get(key) for key in ("node", "generation", "step")}
    content |= {"event": name, "at": at, "reason": str(event.get("reason") or "")}
    if kind is None:
        return Fact(**content)
    content |= {key: details[key] for key in _DETAILS[kind] if key in details}
    if kind is DetectionFact:
        content["how"] = str(details.get("how") or details.get("cause") or "drain")
        content["detected_at"] = float(details.get("detected_at") or event.get("monotonic") or at)
        fault_at, published_at = details.get("fault_at"), event.get("monotonic")
        content["fault_at"] = None
        if fault_at is not None and published_at is not None:  # On the reader's clock.
            content["fault_at"] = at - max(0.0, published_at - fault_at)
    elif kind is FaultInjectedFact:
        content["effective_at"] = float(details.get("at", at))
    elif kind is SaveEndedFact:
        content["kind"] = "snapshots" if name.startswith("Snapshot") else "checkpoints"
        content["completed"] = name.endswith("Completed")
    elif kind is RecoveryCompletedFact:
        recovery = details.get("recovery") or {}
        content["recovery"] = RecoveryDetails(
            **{key: value for key, value in recovery.items() if key in _RECOVERY}
        )
    return kind(**content)


# --- the model ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class JobFacts:
    """The job of the run; fields that no event or state has given yet are ``None``."""

    id: str | None = None
    name: str | None = None
    steps: int | None = None
    global_batch: int | None = None

    def update(self, content: Json) -> None:
        """Copy the fields of the job that an event or a state contains."""
        for name in ("id", "name", "steps", "global_batch"):
            if (value := content.get(name)) is not None:
                setattr(self, name, value)


@dataclass(slots=True, kw_only=True)
class NodeProcesses:
    """Process ids of a node's daemon and of each device's trainers, oldest first."""

    daemon: list[int] = field(default_factory=list)
    trainers: dict[int, list[int]] = field(default_factory=dict)


Numbered = TypeVar("Numbered", StepCommittedFact, EvaluatedFact)
Key = TypeVar("Key")
Value = TypeVar("Value")


class RunModel:
    """The newest job of a cluster, and the cluster since reading began.

    :param most: largest number of steps, recoveries and so on to keep; the newest stay. A bounded model
        also drops the pipelines of recoveries, whose size grows with the cluster. ``None`` keeps
        everything.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._seen: dict[object, None] = {}
        self.state: Json = {}
        """The cluster's newest public state."""
        self.events: list[Json] = []
        """All events but ``StepCommitted``; empty in a bounded model."""
        self.first_at: float | None = None
        """Time of the first event; ``first_event_time`` is its timestamp as the event has it."""
        self.first_event_time: str | None = None
        self.last_at = 0.0
        """Time of the last event before or at the end of the job."""
        self.detections: deque[DetectionFact] = deque(maxlen=most)
        self.faults: dict[tuple[str | None, float], FaultInjectedFact] = {}
        """Injected faults by node and by the time at which they took effect."""
        self.quarantined: dict[str | None, QuarantineFact] = {}
        """Nodes that are set aside, with the fact that says why."""
        self.processes: dict[str, NodeProcesses] = {}
        self.trainers: dict[str, set[int]] = {}
        """Devices of each node whose trainer has been up since the last ``on_daemon``."""
        self.current_recovery: RecoveryTimeline | None = None
        """The recovery in progress."""
        self.started_generation = 0
        """The highest generation that was started; ``completed_generation`` is the highest that committed a
        step.
        """
        self.completed_generation = 0
        self._losses: tuple[DetectionFact, ...] = ()
        """Losses after which no generation has started yet."""
        self.begin_job()

    def begin_job(self) -> None:
        """Clear the job and its steps: all further events belong to another job."""
        self.job = JobFacts()
        self.steps: dict[int, StepCommittedFact] = {}
        """Each step as its newest generation computed it; ``exclude_undone`` filters them."""
        self.evaluations: dict[int, EvaluatedFact] = {}
        self.rollbacks: deque[RolledBackFact] = deque(maxlen=self._most)
        self.newest_step: StepCommittedFact | None = None
        """The newest committed step; after a rollback, the newest one since."""
        self.step = 0
        """The last committed step, or the step that the last rollback returned to."""
        self.commits = 0
        """Number of commits seen, including those of repeated steps."""
        self.start: RecoveryCompletedFact | None = None
        """The first plan of the job. It takes the path of a recovery and is none."""
        self.recoveries: dict[int, RecoveryCompletedFact] = {}
        """Completed recoveries by generation, without ``start``."""
        self.decisions: dict[int, str] = {}
        """Decision about the step in flight (``roll_forward``, ``redo``, …) by generation."""
        self.pauses: deque[ClusterPausedFact] = deque(maxlen=self._most)
        self.problems: deque[Fact] = deque(maxlen=self._most)
        """Events that report a failure with its reason, other than losses of nodes and pauses."""
        self.saves: deque[SaveEndedFact] = deque(maxlen=self._most)
        self.checkpoint_url: str | None = None
        self.ended: JobEndedFact | None = None
        self.goodput = GoodputMeter()

    def on_state(self, state: Json) -> None:
        """Take the cluster's public state. A coordinator's last will changes only the fields that it contains."""
        if state.get("phase") == "UNREACHABLE":
            self.state = mark_unreachable(self.state, str(state.get("reason", "")))
            return
        self.state = state
        job = state.get("job") or {}
        if self.job.id is not None and job.get("id") not in (None, self.job.id):
            self.begin_job()  # The event of its submission comes later or was lost.
        self.job.update(job)

    def on_process(self, node: str, pid: int, device: int | None = None) -> None:
        """Record the process id of a node's daemon, or of the trainer of ``device``.

        After the last step this does nothing: trainers are then started for the next job, and that event
        may arrive before the event of the job's end.
        """
        if self.ended is not None or (self.job.steps is not None and self.job.steps in self.steps):
            return
        processes = self.processes.setdefault(node, NodeProcesses())
        known = processes.daemon if device is None else processes.trainers.setdefault(device, [])
        if pid not in known:
            known.append(pid)

    def on_daemon(self, node: str, pid: int) -> None:
        """Record that a node's daemon was started; none of its trainers is up yet."""
        self.trainers.pop(node, None)
        self.on_process(node, pid)

    def list_unready_nodes(self, nodes: Iterable[str], devices: int) -> list[str]:
        """Return the nodes that cannot take a job yet: not HEALTHY, or with fewer than ``devices`` trainers."""
        # Without a coordinator nothing is known about the nodes.
        states = {} if self.state.get("phase") == "UNREACHABLE" else self.state.get("nodes") or {}
        return [
            name
            for name in nodes
            if states.get(name, {}).get("state") != "HEALTHY" or len(self.trainers.get(name, ())) < devices
        ]

    def on_event(self, event: Json, at: float | None = None) -> Fact | None:
        """Fold one event envelope into the model and return its fact; ``None`` if the event was seen before.

        :param at: time of the event on the reader's clock; ``None`` uses the envelope's ``monotonic``.
        """
        if self._was_seen(event):
            return None
        fact = _fact_of(event, float(event.get("monotonic") or 0.0) if at is None else at)
        if self.first_at is None or fact.at < self.first_at:
            self.first_at, self.first_event_time = fact.at, event.get("at")
        if self.ended is None:
            self.last_at = max(self.last_at, fact.at)
        if self._most is None and fact.event != "StepCommitted":
            self.events.append(event)
        match fact:
            case StepCommittedFact():
                return self._commit(fact)
            case EvaluatedFact():
                self._keep_newest(self.evaluations, fact)
            case RolledBackFact():
                return self._roll_back(fact)
            case JobSubmittedFact():
                self._submit(fact)
            case JobEndedFact():
                self.ended, self.current_recovery, self._losses = fact, None, ()
                self.goodput.end(fact.at)
            case RecoveryCompletedFact():
                return self._complete(fact)
            case DetectionFact():
                self.detections.append(fact)
                if fact.event != "NodeDraining":
                    self._losses = (*self._losses, fact)[-MAX_LOSSES:]
            case FaultInjectedFact():
                self._put(self.faults, (fact.node, fact.effective_at), fact)
            case QuarantineFact():
                self.quarantined.pop(fact.node, None)
                if fact.readmit:
                    self._put(self.quarantined, fact.node, fact)
            case ClusterPausedFact():
                self.pauses.append(fact)
                if self.current_recovery is not None:
                    self.current_recovery = replace(self.current_recovery, pause_reason=fact.reason)
            case SaveEndedFact():
                self.saves.append(fact)
            case CheckpointStartedFact():
                self.checkpoint_url = fact.url
            case TrainerStartedFact():
                self._start_trainer(fact)
            case GenerationStartedFact():
                self._begin_generation(fact)
            case PhaseEndedFact():
                self._end_phase(fact)
        if fact.event in PROBLEMS:
            self.problems.append(fact)
        return fact

    def exclude_undone(self, by_step: Mapping[int, Numbered]) -> list[Numbered]:
        """Return the steps or evaluations that no rollback has undone, ordered by step."""
        return [fact for _, fact in sorted(by_step.items()) if not self._is_undone(fact)]

    def _is_undone(self, fact: StepCommittedFact | EvaluatedFact) -> bool:
        return any(fact.step > one.to_step and _is_older(fact, one) for one in self.rollbacks)

    # --- one method for each kind of event ------------------------------------------------------------

    def _was_seen(self, event: Json) -> bool:
        """Return whether an event was seen before, and remember it. An event without id and time is always
        new.
        """
        identity: object = event.get("id")
        if not identity:
            if event.get("monotonic") is None:
                return False
            identity_keys = ("event", "monotonic", "cause", "node", "generation", "step")
            identity = (*(event.get(key) for key in identity_keys), repr(event.get("details")))
        if identity in self._seen:
            return True
        self._put(self._seen, identity, None, None if self._most is None else MAX_IDENTITIES)
        return False

    def _submit(self, fact: JobSubmittedFact) -> None:
        is_new_job = fact.job != self.job.id if fact.job is not None else bool(self.steps)
        if is_new_job:
            self.begin_job()
        self.job.update(
            {"id": fact.job, "name": fact.name, "steps": fact.steps, "global_batch": fact.global_batch}
        )

    def _commit(self, fact: StepCommittedFact) -> StepCommittedFact:
        self.commits += 1
        undone = self._is_undone(fact)
        if undone or fact.step <= self.step:
            fact = replace(fact, fresh=False)
        if self._keep_newest(self.steps, fact) and not undone:
            self.goodput.commit(fact.step, fact.step_s or 0.0, fact.at)
        if fact.fresh or (not undone and self.newest_step is not None and fact.step == self.newest_step.step):
            self.newest_step, self.step = fact, fact.step
        return fact

    def _roll_back(self, fact: RolledBackFact) -> RolledBackFact:
        undone_at = [
            one.at for step, one in self.steps.items() if step > fact.to_step and _is_older(one, fact)
        ]
        fact = replace(
            fact,
            undone_s=self.goodput.roll_back(fact.to_step),
            last_commit_at=max(undone_at, default=None),
        )
        self.rollbacks.append(fact)
        self.step = min(self.step, fact.to_step)
        if int(self.state.get("step") or 0) > fact.to_step:
            self.state = {**self.state, "step": fact.to_step}
        undone: list[dict[int, Any]] = [self.steps, self.evaluations]
        for by_step in undone:
            for step in [
                step for step, one in by_step.items() if step > fact.to_step and _is_older(one, fact)
            ]:
                del by_step[step]
        return fact

    def _begin_generation(self, fact: GenerationStartedFact) -> None:
        """Begin a recovery, or a further attempt after something else failed on the way."""
        self.started_generation = max(self.started_generation, fact.generation or 0)
        before = self.current_recovery
        losses = (*(before.losses if before is not None else ()), *self._losses)[-MAX_LOSSES:]
        self._losses = ()
        detected = min((loss.at for loss in losses), default=fact.at)
        faults = [loss.fault_at for loss in losses if loss.fault_at is not None]
        if before is not None and before.pause_reason is not None:
            waited_until: float | None = fact.at
        else:
            ends = {name: end for name, _, end in before.phases} if before is not None else {}
            waited_until = ends.get("wait")
        self.current_recovery = RecoveryTimeline(
            generation=fact.generation,
            attempts=before.attempts + 1 if before is not None else 1,
            step=fact.step,
            mode=fact.mode,
            cause=fact.recovery_cause,
            reason=fact.reason,
            losses=losses,
            phases=(
                *((("detect", min(faults), detected),) if faults else ()),
                *((("wait", detected, waited_until),) if waited_until is not None else ()),
                ("quiesce", detected if waited_until is None else waited_until, None),
            ),
        )

    def _end_phase(self, fact: PhaseEndedFact) -> None:
        if fact.event == "Quiesced" and fact.generation is not None:
            self._put(self.decisions, fact.generation, str(fact.decision))
        timeline = self.current_recovery
        if timeline is None or fact.generation != timeline.generation:
            return
        *before, (name, began, _) = timeline.phases
        timeline = replace(
            timeline, phases=(*before, (name, began, fact.at), (_NEXT_PHASE[fact.event], fact.at, None))
        )
        if fact.event == "Quiesced":
            timeline = replace(timeline, decision=fact.reason)
        elif fact.event == "PlanChosen":
            timeline = replace(timeline, plan=fact.reason, pause_reason=None)
        self.current_recovery = timeline

    def _complete(self, fact: RecoveryCompletedFact) -> RecoveryCompletedFact | None:
        generation = fact.recovery.generation
        self.completed_generation = max(self.completed_generation, generation)
        start = self.start.recovery.generation if self.start is not None else None
        if generation in self.recoveries or generation == start:
            return None
        fact = replace(fact, timeline=self.current_recovery)
        self.current_recovery = None
        if self._most is not None:
            fact = replace(fact, recovery=replace(fact.recovery, pipelines_before=[], pipelines_after=[]))
        if fact.recovery.is_start:
            self.start = fact
        else:
            self._put(self.recoveries, generation, fact)
        return fact

    def _start_trainer(self, fact: TrainerStartedFact) -> None:
        if fact.node is None:
            return
        self.trainers.setdefault(fact.node, set()).add(fact.device)
        if fact.daemon_pid is not None:
            self.on_process(fact.node, fact.daemon_pid)
        if fact.pid is not None:
            self.on_process(fact.node, fact.pid, fact.device)

    # --- bounds --------------------------------------------------------------------------------------

    def _keep_newest(self, by_step: dict[int, Numbered], fact: Numbered) -> bool:
        """Store the fact if its generation is newer than the stored one's; return whether it was stored."""
        before = by_step.get(fact.step)
        if before is not None and (fact.generation or 0) <= (before.generation or 0):
            return False
        by_step.pop(fact.step, None)
        self._put(by_step, fact.step, fact)
        return True

    def _put(self, mapping: dict[Key, Value], key: Key, value: Value, most: int | None = None) -> None:
        """Set an entry and drop the oldest one beyond the limit. An existing key keeps its position."""
        most = self._most if most is None else most
        mapping[key] = value
        if most is not None and len(mapping) > most:
            del mapping[next(iter(mapping))]


def _is_older(fact: Fact, rollback: RolledBackFact) -> bool:
    return (fact.generation or 0) < (rollback.generation or 0)
