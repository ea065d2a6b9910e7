"""The model of a run: the one place where the event stream and the cluster's states are folded.

``Run.on_event`` takes each event, ``Run.on_state`` each state. ``on_event`` returns what the event says as a typed
fact, or ``None`` for an event that was seen before. Report, live view, dashboard, metrics, chaos and the drivers of
local clusters read the model and its facts.

Events may come twice (MQTT with QoS 1; the journal after the stream) and in another order than they happened. So steps
are compared by their generation, and what relates several events is related when it is read.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from ftd.observe.goodput import GoodputMeter

Json = Mapping[str, Any]

FAILURE_CAUSES = frozenset({"node_lost", "trainer_lost", "connection_lost"})
FAULT_COUNTS_S = 60.0
"""A fault that was injected longer before a loss did not cause it."""
MOST_IDENTITIES = 20_000
"""Events that a bounded model remembers, so that a second delivery is recognised."""
MOST_LOSSES = 32
"""Losses of one recovery, and nodes whose fault no loss has followed yet; the newest ones count."""


def is_failure(cause: str, rolled_back_steps: int) -> bool:
    """Return whether a recovery began with a failure: a loss, or state that had to be taken from a snapshot."""
    return cause in FAILURE_CAUSES or rolled_back_steps > 0


def mark_unreachable(state: Json, reason: str) -> dict[str, Any]:
    """Return the state of a cluster whose coordinator is away: the rest is as it was published last."""
    return {**state, "phase": "UNREACHABLE", "reason": reason, "leader": "", "standbys": [], "ineligible": {}}


# --- facts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """An event; those that the model folds have a class of their own, with the details that are read."""

    event: str
    at: float
    """Moment of the event in seconds, on the clock of the reader."""
    node: str | None
    generation: int | None
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(Fact):
    job: str | None = None
    """Id of the job."""
    name: str | None = None
    steps: int | None = None
    global_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Fact):
    """``JobFinished``, ``JobFailed`` or ``JobStopped``."""

    checksum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(Fact):
    step: int
    loss: float | None = None
    gradient_norm: float | None = None
    skipped: bool = False
    step_s: float | None = None
    learning_rate: float | None = None
    weight: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    fresh: bool = True
    """False where this step or a later one was committed before, and no rollback has undone it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Fact):
    step: int
    loss: float | None = None
    weight: float | None = None
    metrics: Json | None = None
    took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Fact):
    """The steps after ``to_step`` were undone."""

    to_step: int = 0
    undone_s: float = 0.0
    """Time that had gone into the undone steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection(Fact):
    """``NodeLost``, ``TrainerLost`` or ``NodeDraining``."""

    how: str
    """How it was noticed: of a node ``last_will``, ``silence``, …, of a trainer the cause of its failure."""
    detected_at: float
    """Monotonic time at which the coordinator knew, which may be a moment before it published the event."""
    fault_at: float | None = None
    """Moment of the injected fault that caused it, where one is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected(Fact):
    fault: str = "?"
    target: str | None = None
    device: int | None = None
    strikes_at: float
    """Monotonic time at which it strikes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPaused(Fact):
    needed: int | None = None
    present: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEndedFact(Fact):
    """A snapshot or a persistent checkpoint is complete, or was given up."""

    kind: Literal["snapshots", "checkpoints"]
    completed: bool
    size_bytes: int | None = None
    protection: str | None = None
    took_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStarted(Fact):
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted(Fact):
    device: int
    pid: int | None = None
    daemon_pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Fact):
    mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded(Fact):
    """``Quiesced``, ``PlanChosen`` or ``TrainingResumed``."""

    decision: str | None = None
    pipelines: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDetails:
    """The details of a completed recovery (``ftd.transport.wire.event_details.RecoveryData``)."""

    generation: int = 0
    cause: str = ""
    nodes: list[str] = field(default_factory=list)
    detected_how: str | None = None
    detected_at: float = 0.0
    fault_at: float | None = None
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
        """Whether it began with a failure."""
        return is_failure(self.cause, self.rolled_back_steps)

    @property
    def completed_at(self) -> float:
        """Monotonic time at which the next step was committed."""
        return self.detected_at + self.total_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimeline:
    """A recovery as events show it on its way. A phase ends with the event that begins the next one::

    detect    the fault (where it was injected, so that its moment is known) … NodeLost, TrainerLost
    quiesce   … Quiesced          every survivor has stopped and reported
    plan      … PlanChosen
    state     … TrainingResumed   all have met and hold their layers
    resume    … RecoveryCompleted the next step is committed
    """

    generation: int | None
    tries: int
    """Generations so far: one more for each failure on the way."""
    step: int | None
    mode: str | None
    why: str
    losses: tuple[Detection, ...]
    phases: tuple[tuple[str, float, float | None], ...]
    """Name of each phase, when it began, and when it ended; ``None`` while it lasts."""
    decision: str | None = None
    plan: str | None = None
    paused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCompleted(Fact):
    recovery: RecoveryDetails
    course: RecoveryTimeline | None = None
    """What was seen on the way; ``None`` where its beginning was not."""


_FACTS: dict[str, type[Fact]] = {
    "JobSubmitted": JobSubmitted,
    **dict.fromkeys(("JobFinished", "JobFailed", "JobStopped"), JobEnded),
    "StepCommitted": StepCommitted,
    "Evaluated": Evaluated,
    "RolledBack": RolledBack,
    **dict.fromkeys(("NodeLost", "TrainerLost", "NodeDraining"), Detection),
    "ChaosInjected": FaultInjected,
    "ClusterPaused": ClusterPaused,
    **dict.fromkeys(
        ("SnapshotCompleted", "SnapshotAbandoned", "CheckpointCompleted", "CheckpointAbandoned"),
        SaveEndedFact,
    ),
    "CheckpointStarted": CheckpointStarted,
    "TrainerStarted": TrainerStarted,
    "GenerationStarted": GenerationStarted,
    **dict.fromkeys(("Quiesced", "PlanChosen", "TrainingResumed"), PhaseEnded),
    "RecoveryCompleted": RecoveryCompleted,
}
_ENVELOPE = {one.name for one in fields(Fact)}
_DETAILS = {kind: [one.name for one in fields(kind) if one.name not in _ENVELOPE] for kind in _FACTS.values()}
"""Details that are read of each kind of event, under the same name."""
_RECOVERY = {one.name for one in fields(RecoveryDetails)}
_NEXT_PHASE = {"Quiesced": "plan", "PlanChosen": "state", "TrainingResumed": "resume"}


def _fact_of(event: Json, at: float) -> Fact:
    """Return what an event envelope says."""
    name, details = str(event.get("event")), event.get("details") or {}
    kind = _FACTS.get(name)
    said: dict[str, Any] = {key: event.get(key) for key in ("node", "generation", "step")}
    said |= {"event": name, "at": at, "reason": str(event.get("reason") or "")}
    if kind is None:
        return Fact(**said)
    said |= {key: details[key] for key in _DETAILS[kind] if key in details}
    if kind is Detection:
        said["how"] = str(details.get("how") or details.get("cause") or "drain")
        said["detected_at"] = float(details.get("detected_at") or event.get("monotonic") or at)
    elif kind is FaultInjected:
        said["strikes_at"] = float(details.get("at", at))
    elif kind is SaveEndedFact:
        said["kind"] = "snapshots" if name.startswith("Snapshot") else "checkpoints"
        said["completed"] = name.endswith("Completed")
    elif kind is RecoveryCompleted:
        recovery = details.get("recovery") or {}
        said["recovery"] = RecoveryDetails(
            **{key: value for key, value in recovery.items() if key in _RECOVERY}
        )
    return kind(**said)


# --- the model ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class JobFacts:
    """The job of the run; ``None`` where nothing has said it."""

    id: str | None = None
    name: str | None = None
    steps: int | None = None
    global_batch: int | None = None

    def learn(self, said: Json) -> None:
        """Take what an event or a state says of the job."""
        for name in ("id", "name", "steps", "global_batch"):
            if (value := said.get(name)) is not None:
                setattr(self, name, value)


@dataclass(slots=True, kw_only=True)
class NodeProcesses:
    """Pids that a node's daemon had, and those of each device's trainers, in the order in which they became known."""

    daemon: list[int] = field(default_factory=list)
    trainers: dict[int, list[int]] = field(default_factory=dict)


Numbered = TypeVar("Numbered", StepCommitted, Evaluated)
Key = TypeVar("Key")
Value = TypeVar("Value")


class RunModel:
    """What is known of the newest job of a cluster, and of the cluster since reading began.

    :param most: how many steps, recoveries and so on are kept, the newest ones, and without the layouts of recoveries,
        which are as large as the cluster; ``None``: all of them, whole.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._seen: dict[object, None] = {}
        self.state: Json = {}
        """The cluster's newest public state."""
        self.began_at: float | None = None
        """Moment of the first event; ``began`` as it is written in the event."""
        self.began: str | None = None
        self.last_at = 0.0
        """Moment of the last event up to the end of the job."""
        self.detections: deque[Detection] = deque(maxlen=most)
        self.faults: dict[tuple[str | None, float], FaultInjected] = {}
        """By node and moment of the strike."""
        self.processes: dict[str, NodeProcesses] = {}
        self.trainers: dict[str, set[int]] = {}
        """Devices of each node whose trainer was up at some time since ``on_daemon``."""
        self.current_recovery: RecoveryTimeline | None = None
        """The recovery that is under way."""
        self.started_generation = 0
        """The highest generation that was started; ``completed_generation`` that committed a step."""
        self.completed_generation = 0
        self._losses: tuple[Detection, ...] = ()
        """Losses after which no generation has been started yet."""
        self._unanswered: dict[str, float] = {}
        """Moment of the newest fault of each node that no loss has followed."""
        self.begin_job()

    def begin_job(self) -> None:
        """Forget the job and its steps: what comes is of another one."""
        self.job = JobFacts()
        self.steps: dict[int, StepCommitted] = {}
        """Each step as its newest generation computed it; see ``exclude_undone``."""
        self.evaluations: dict[int, Evaluated] = {}
        self.rollbacks: deque[RolledBack] = deque(maxlen=self._most)
        self.newest_step: StepCommitted | None = None
        """The step that was committed last, with the highest number since the last rollback."""
        self.step = 0
        """The last committed step, or the one that the last rollback went back to."""
        self.commits = 0
        """How many commits were seen, those of steps that were done again included."""
        self.recoveries: dict[int, RecoveryCompleted] = {}
        """By generation."""
        self.decisions: dict[int, str] = {}
        """``roll_forward``, ``redo``, …, by generation."""
        self.pauses: deque[ClusterPaused] = deque(maxlen=self._most)
        self.saves: deque[SaveEndedFact] = deque(maxlen=self._most)
        self.checkpoint_url: str | None = None
        self.ended: JobEnded | None = None
        self.goodput = GoodputMeter()

    def on_state(self, state: Json) -> None:
        """Take the cluster's public state. The last will of a coordinator changes only what it says."""
        if state.get("phase") == "UNREACHABLE":
            self.state = mark_unreachable(self.state, str(state.get("reason", "")))
            return
        self.state = state
        job = state.get("job") or {}
        if self.job.id is not None and job.get("id") not in (None, self.job.id):
            self.begin_job()  # The event of its submission comes later, or was lost.
        self.job.learn(job)

    def on_process(self, node: str, pid: int, device: int | None = None) -> None:
        """Note the pid of a node's daemon, or of the trainer of ``device``.

        After the last step none is noted: trainers are started for the next job, and the event of that may come before
        the event of the job's end.
        """
        if self.ended is not None or (self.job.steps is not None and self.job.steps in self.steps):
            return
        processes = self.processes.setdefault(node, NodeProcesses())
        known = processes.daemon if device is None else processes.trainers.setdefault(device, [])
        if pid not in known:
            known.append(pid)

    def on_daemon(self, node: str, pid: int) -> None:
        """Note that the daemon of a node was started: none of its trainers is up yet."""
        self.trainers.pop(node, None)
        self.on_process(node, pid)

    def list_unready_nodes(self, nodes: Iterable[str], devices: int) -> list[str]:
        """Return those nodes that cannot take a job yet: not healthy, or not with so many trainers."""
        # Nothing is known of nodes while nobody coordinates.
        states = {} if self.state.get("phase") == "UNREACHABLE" else self.state.get("nodes") or {}
        return [
            name
            for name in nodes
            if states.get(name, {}).get("state") != "HEALTHY" or len(self.trainers.get(name, ())) < devices
        ]

    def on_event(self, event: Json, at: float | None = None) -> Fact | None:
        """Fold one event envelope in and return what it says; ``None`` when it was seen before.

        :param at: moment of the event on the reader's clock; ``None``: its ``monotonic``.
        """
        if self._was_seen(event):
            return None
        fact = _fact_of(event, float(event.get("monotonic") or 0.0) if at is None else at)
        if self.began_at is None or fact.at < self.began_at:
            self.began_at, self.began = fact.at, event.get("at")
        if self.ended is None:
            self.last_at = max(self.last_at, fact.at)
        match fact:
            case StepCommitted():
                return self._commit(fact)
            case Evaluated():
                self._keep_newest(self.evaluations, fact)
            case RolledBack():
                return self._roll_back(fact)
            case JobSubmitted():
                self._submit(fact)
            case JobEnded():
                self.ended, self.current_recovery, self._losses = fact, None, ()
                self.goodput.end(fact.at)
            case RecoveryCompleted():
                return self._complete(fact)
            case Detection():
                return self._detect(fact)
            case FaultInjected():
                self._put(self.faults, (fact.node, fact.strikes_at), fact)
                self._put(self._unanswered, fact.node or "", fact.at, MOST_LOSSES)
            case ClusterPaused():
                self.pauses.append(fact)
                if self.current_recovery is not None:
                    self.current_recovery = replace(self.current_recovery, paused=fact.reason)
            case SaveEndedFact():
                self.saves.append(fact)
            case CheckpointStarted():
                self.checkpoint_url = fact.url
            case TrainerStarted():
                self._start_trainer(fact)
            case GenerationStarted():
                self._begin_generation(fact)
            case PhaseEnded():
                self._end_phase(fact)
        return fact

    def exclude_undone(self, by_step: Mapping[int, Numbered]) -> list[Numbered]:
        """Return those steps or evaluations that no rollback undid, in the order of the steps."""
        return [fact for _, fact in sorted(by_step.items()) if not self._is_undone(fact)]

    def _is_undone(self, fact: StepCommitted | Evaluated) -> bool:
        return any(fact.step > one.to_step and _is_older(fact, one) for one in self.rollbacks)

    # --- events, one kind each -----------------------------------------------------------------------

    def _was_seen(self, event: Json) -> bool:
        """Return whether an event came before, and remember it. One without id and time cannot be recognised."""
        identity: object = event.get("id")
        if not identity:
            if event.get("monotonic") is None:
                return False
            of = ("event", "monotonic", "cause", "node", "generation", "step")
            identity = (*(event.get(key) for key in of), repr(event.get("details")))
        if identity in self._seen:
            return True
        self._put(self._seen, identity, None, None if self._most is None else MOST_IDENTITIES)
        return False

    def _submit(self, fact: JobSubmitted) -> None:
        another = fact.job != self.job.id if fact.job is not None else bool(self.steps)
        if another:
            self.begin_job()
        self.job.learn(
            {"id": fact.job, "name": fact.name, "steps": fact.steps, "global_batch": fact.global_batch}
        )

    def _commit(self, fact: StepCommitted) -> StepCommitted:
        self.commits += 1
        undone = self._is_undone(fact)
        if undone or fact.step <= self.step:
            fact = replace(fact, fresh=False)
        if self._keep_newest(self.steps, fact) and not undone:
            self.goodput.commit(fact.step, fact.step_s or 0.0, fact.at)
        if fact.fresh or (not undone and self.newest_step is not None and fact.step == self.newest_step.step):
            self.newest_step, self.step = fact, fact.step
        return fact

    def _roll_back(self, fact: RolledBack) -> RolledBack:
        fact = replace(fact, undone_s=self.goodput.roll_back(fact.to_step))
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

    def _detect(self, fact: Detection) -> Detection:
        if fact.event != "NodeDraining":
            fault_at = self._unanswered.pop(fact.node or "", None)
            if fault_at is not None and 0 <= fact.at - fault_at <= FAULT_COUNTS_S:
                fact = replace(fact, fault_at=fault_at)
            self._losses = (*self._losses, fact)[-MOST_LOSSES:]
        self.detections.append(fact)
        return fact

    def _begin_generation(self, fact: GenerationStarted) -> None:
        """Begin a recovery, or try once more because something failed on the way."""
        self.started_generation = max(self.started_generation, fact.generation or 0)
        before = self.current_recovery
        losses = (*(before.losses if before is not None else ()), *self._losses)[-MOST_LOSSES:]
        self._losses = ()
        detected = min((loss.at for loss in losses), default=fact.at)
        faults = [loss.fault_at for loss in losses if loss.fault_at is not None]
        self.current_recovery = RecoveryTimeline(
            generation=fact.generation,
            tries=before.tries + 1 if before is not None else 1,
            step=fact.step,
            mode=fact.mode,
            why=fact.reason,
            losses=losses,
            phases=(*((("detect", min(faults), detected),) if faults else ()), ("quiesce", detected, None)),
        )

    def _end_phase(self, fact: PhaseEnded) -> None:
        if fact.event == "Quiesced" and fact.generation is not None:
            self._put(self.decisions, fact.generation, str(fact.decision))
        course = self.current_recovery
        if course is None or fact.generation != course.generation:
            return
        *before, (name, began, _) = course.phases
        course = replace(
            course, phases=(*before, (name, began, fact.at), (_NEXT_PHASE[fact.event], fact.at, None))
        )
        if fact.event == "Quiesced":
            course = replace(course, decision=fact.reason)
        elif fact.event == "PlanChosen":
            course = replace(course, plan=fact.reason, paused=None)
        self.current_recovery = course

    def _complete(self, fact: RecoveryCompleted) -> RecoveryCompleted | None:
        generation = fact.recovery.generation
        self.completed_generation = max(self.completed_generation, generation)
        if generation in self.recoveries:
            return None
        fact = replace(fact, course=self.current_recovery)
        self.current_recovery = None
        if self._most is not None:
            fact = replace(fact, recovery=replace(fact.recovery, pipelines_before=[], pipelines_after=[]))
        self._put(self.recoveries, generation, fact)
        return fact

    def _start_trainer(self, fact: TrainerStarted) -> None:
        if fact.node is None:
            return
        self.trainers.setdefault(fact.node, set()).add(fact.device)
        if fact.daemon_pid is not None:
            self.on_process(fact.node, fact.daemon_pid)
        if fact.pid is not None:
            self.on_process(fact.node, fact.pid, fact.device)

    # --- bounds --------------------------------------------------------------------------------------

    def _keep_newest(self, by_step: dict[int, Numbered], fact: Numbered) -> bool:
        """Keep what was computed by the newest generation; return whether this is it."""
        before = by_step.get(fact.step)
        if before is not None and (fact.generation or 0) <= (before.generation or 0):
            return False
        by_step.pop(fact.step, None)
        self._put(by_step, fact.step, fact)
        return True

    def _put(self, mapping: dict[Key, Value], key: Key, value: Value, most: int | None = None) -> None:
        """Add an entry, and remove the oldest one where there are too many. One that is there stays in its place."""
        most = self._most if most is None else most
        mapping[key] = value
        if most is not None and len(mapping) > most:
            del mapping[next(iter(mapping))]


def _is_older(fact: Fact, rollback: RolledBack) -> bool:
    return (fact.generation or 0) < (rollback.generation or 0)
