"""The rules that must hold for a cluster while faults are injected, checked with its public events and states
alone.

The monitor is pure: you feed it with events, states and times (seconds on one clock), and it collects
violations.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftd.observe.run_model import (
    DetectionFact,
    Fact,
    GenerationStartedFact,
    JobEndedFact,
    RecoveryCompletedFact,
    RecoveryDetails,
    RolledBackFact,
    RunModel,
    StepCommittedFact,
)

Json = Mapping[str, Any]

_FORBIDDEN_EVENTS = {
    "MessageRejected": "rejected",
    "ReplicasDiverged": "diverged",
    "OptimizerReplicaDiverged": "diverged",
    "SnapshotsUnavailable": "snapshots",
}
"""Events that no fault of a soak may cause, with the name of the rule that they violate."""
_BUG_CAUSES = frozenset({"exited", "raised", "unprepared", "foreign"})
"""Causes of a trainer's failure that mean a bug if no fault was injected there; ``hung`` may be a busy
machine.
"""
_END_OF_PHASE = {"FINISHED": "JobFinished", "FAILED": "JobFailed"}
_EVENT_GRACE_S = 2.0
"""Longest time from a state until an event about the same fact arrives."""
GROWTH = 100.0
"""Factor by which rounding alone may make a loss differ more from the undisturbed run's than any earlier loss
of the round did. A factor of 13 was measured: in float64, 1e-16 of a loss becomes 1e-9 within 800 steps of
Adam, and becomes 1 within 2000 steps. Work that is lost or done twice shows at once.
"""
MAX_RECORDS = 1000
"""The number of records of each kind that the run model retains."""
STARVATION_FACTOR = 4
"""The multiple of the limit for which faults, one after the other, may keep training from committing any step."""
_FAULT_EFFECT_S = 20.0
"""A failure counts as the consequence of a fault in the same node for this long."""
_IGNORED_REJECTIONS = ("chaos/",)
"""Topics on which the soak itself may address a node that is just ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that was violated."""

    at_s: float
    rule: str
    """``step``, ``loss``, ``generation``, ``rejected``, ``diverged``, ``snapshots``, ``damage``, ``failed``,
    ``unprovoked``, ``stuck``, ``gap``, ``process``, ``left_over`` or ``injection``.
    """
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRecovery:
    """A recovery that was observed."""

    at_s: float
    """Time at which the first step after the recovery was committed."""
    cause: str
    tier: str
    total_ms: float
    """The recovery's own duration, from the fault or its best estimate."""
    generation: int
    rolled_back_steps: int


@dataclass(slots=True, kw_only=True)
class SoakMonitor:
    """The monitor of a soak: it collects the observations and the violations of its rules.

    :param limit_s: training must go on within this time after a fault, whichever it was.
    :param relative: the relative difference that the loss of a step may have from its first value; it may
        also be ``GROWTH`` times the largest difference of any earlier step of the round.
    """

    limit_s: float
    relative: float
    standbys: bool = False
    """Whether there are several coordinators, so that a journal contains only what was published while its
    owner was there.
    """
    violations: list[Violation] = field(default_factory=list)
    recoveries: list[ObservedRecovery] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)
    """Times of commits, with the number of steps that had never been committed before."""
    unprovoked: list[str] = field(default_factory=list)
    """Losses of nodes and trainers that no fault explains and that a busy machine may have caused."""
    rollbacks: int = 0
    run: RunModel = field(default_factory=lambda: RunModel(most=MAX_RECORDS))
    losses: dict[int, float | None] = field(default_factory=dict)
    """The first loss of each step: from the undisturbed run, or else from an earlier round."""
    state: Json = field(default_factory=dict)
    """The cluster's newest state."""
    job: str | None = None
    """The id of the round's job; ``None`` between two rounds."""
    ended: str | None = None
    """The event that ended the round's job."""
    step: int = 0
    """The round's last committed step according to the events."""
    highest_step: int = 0
    """The highest committed step of the round; a rollback does not change it."""
    repeated_steps: int = 0
    """Steps that had been committed before, in all rounds."""
    events_may_be_missing: bool = False
    """Whether the broker was away, so that events may be missing."""
    excused: bool = False
    """Whether more was lost at once than the job tolerates, so that it may fail."""
    flipped: bool = False
    """Whether a bit was flipped on purpose."""
    _generations: dict[str, int] = field(default_factory=dict)
    _may_repeat_events: bool = False
    """Whether a coordinator was restarted, so that it may publish again what it had not journaled."""
    _published: dict[int, float | None] = field(default_factory=dict)
    """Losses of the round's steps, as they were published."""
    _largest_difference: float = 0.0
    """The largest relative difference of a loss in this round."""
    _affected_until: dict[str, float] = field(default_factory=dict)
    _last_activity_s: float = 0.0
    """The time of the last progress or disturbance."""
    _progress_s: float = 0.0
    _stuck: bool = False
    _end_seen_at_s: float | None = None
    _went_back: tuple[float, int, int] | None = None
    """Time at which the state went back, and the steps from which and to which it went."""
    _rolled_back_s: float = -math.inf

    # --- rounds and faults --------------------------------------------------------------------------

    def begin_round(self, job: str, at_s: float) -> None:
        """Note that a job was submitted."""
        self.job, self.ended, self.step, self.highest_step = job, None, 0, 0
        self.events_may_be_missing = self._may_repeat_events = self._stuck = self.excused = False
        self._end_seen_at_s, self._largest_difference = None, 0.0
        self._published.clear()
        self._last_activity_s, self._progress_s = max(self._last_activity_s, at_s), at_s

    def on_injected(self, node: str | None, do: str, until_s: float) -> None:
        """Note that a fault is injected whose effects are over at ``until_s``."""
        self._last_activity_s = max(self._last_activity_s, until_s)
        if node is not None:
            self._affected_until[node] = max(self._affected_until.get(node, 0.0), until_s)
        self.events_may_be_missing |= do == "kill_broker"
        self.flipped |= do == "flip"

    def add_violation(self, at_s: float, rule: str, detail: str) -> None:
        self.violations.append(Violation(at_s=round(at_s, 3), rule=rule, detail=detail))

    # --- events and states --------------------------------------------------------------------------

    def on_event(self, event: Json, at_s: float) -> None:
        """Take an event; a second delivery changes nothing."""
        match self.run.on_event(event, at_s):
            case StepCommittedFact() as fact:
                self._on_commit(fact)
            case RolledBackFact() as fact:
                self.rollbacks += 1
                self._rolled_back_s = at_s
                self.step = fact.to_step
            case GenerationStartedFact(generation=int(generation)):
                self._check_generation("events", generation, at_s)
            case RecoveryCompletedFact() as fact if not fact.recovery.is_start:
                self._on_recovery(fact.recovery, at_s)
            case JobEndedFact() as fact:
                self._on_end(fact.event, fact.reason, at_s)
            case DetectionFact(event="TrainerLost" | "NodeLost") as fact:
                self._on_lost(fact)
            case Fact(event="CoordinatorStarted"):
                self._may_repeat_events = True
            case Fact(event="ShardCorrupted") as fact if not self.flipped:
                self.add_violation(at_s, "damage", f"{fact.node}: {fact.reason}")
            case Fact() as fact if fact.event in _FORBIDDEN_EVENTS:
                self._on_forbidden(fact, event)
            case _:
                pass

    def on_state(self, state: Json, at_s: float) -> None:
        """Take the cluster's state. The last will of a coordinator is ignored."""
        if state.get("phase") == "UNREACHABLE":
            return
        before, self.state = self.state, state
        self._check_generation("states", int(state.get("generation") or 0), at_s)
        job, coordinator = (state.get("job") or {}).get("id"), state.get("coordinator")
        alike = (job, coordinator, state.get("generation"))
        was = ((before.get("job") or {}).get("id"), before.get("coordinator"), before.get("generation"))
        step, old = int(state.get("step") or 0), int(before.get("step") or 0)
        if alike == was and step < old:
            self._went_back = (at_s, old, step)

    def on_time(self, at_s: float) -> bool:
        """Return whether training is stuck. It is reported once, until training goes on."""
        self._detect_end(at_s)
        self._check_step_went_back(at_s)
        if self.job is None or self.ended or self._stuck:
            return self._stuck
        if at_s - self._last_activity_s > self.limit_s:
            since = f"within {self.limit_s:g} s after the last fault"
        elif at_s - self._progress_s > STARVATION_FACTOR * self.limit_s:
            since = f"for {STARVATION_FACTOR * self.limit_s:g} s, whatever faults were injected meanwhile"
        else:
            return False
        self._stuck = True
        phase, waiting = self.state.get("phase"), self.state.get("waiting_for")
        self.add_violation(
            at_s,
            "stuck",
            f"no step was committed {since}: {phase} at step {self.step}, generation "
            f"{self.state.get('generation')}, waiting for {waiting or 'nothing'}",
        )
        return True

    def _check_step_went_back(self, at_s: float) -> None:
        """Check that a state that went back belongs to a rollback, whose event comes a little earlier or
        later.
        """
        if self._went_back is None:
            return
        when, old, step = self._went_back
        if abs(self._rolled_back_s - when) < _EVENT_GRACE_S or self.events_may_be_missing:
            self._went_back = None
        elif at_s - when > _EVENT_GRACE_S:
            self._went_back = None
            self.add_violation(
                when, "step", f"the cluster's state went back from step {old} to {step} without a rollback"
            )

    def _detect_end(self, at_s: float) -> None:
        """Detect the job's end from the state, since a broker may have lost the event."""
        name = _END_OF_PHASE.get(str(self.state.get("phase")))
        if name is None or self.ended or (self.state.get("job") or {}).get("id") != self.job:
            self._end_seen_at_s = None
            return
        self._end_seen_at_s = at_s if self._end_seen_at_s is None else self._end_seen_at_s
        if at_s - self._end_seen_at_s > _EVENT_GRACE_S:
            self._on_end(name, str(self.state.get("outcome")), at_s)

    def check_journal(self, steps: Iterable[Json], at_s: float) -> None:
        """Check the coordinator's journal of the job at a round's end."""
        rows = {int(row["step"]): (row.get("details") or {}).get("loss") for row in steps}
        newest = max(rows, default=0)
        there = rows.keys() | self._published.keys() if self.standbys else rows.keys()
        missing = [step for step in range(1, newest + 1) if step not in there]
        if missing:
            self.add_violation(at_s, "gap", f"the journal lacks {len(missing)} steps, {missing[0]} the first")
        if newest < self.step and not (self.events_may_be_missing or self.standbys):
            self.add_violation(
                at_s, "gap", f"step {self.step} was published, but the journal ends with {newest}"
            )
        for step, loss in sorted(rows.items()):
            if step not in self._published or self._published[step] != loss:
                self._compare(step, loss, at_s)

    # --- rules -------------------------------------------------------------------------------------

    def _on_commit(self, fact: StepCommittedFact) -> None:
        step, at_s = fact.step, fact.at
        if self.job is None or self.ended:
            return
        if step <= self.step and not (self.events_may_be_missing or self._may_repeat_events):
            self.add_violation(at_s, "step", f"step {step} was published after step {self.step}")
        if step > self.highest_step:
            self.commits.append((at_s, step - self.highest_step))
        else:
            self.repeated_steps += 1
        self.step, self.highest_step = step, max(self.highest_step, step)
        self._last_activity_s, self._progress_s, self._stuck = max(self._last_activity_s, at_s), at_s, False
        self._compare(step, fact.loss, at_s)

    def _compare(self, step: int, loss: float | None, at_s: float) -> None:
        """Check that a loss equals, up to rounding, the first loss of the same step."""
        first, self._published[step] = self.losses.setdefault(step, loss), loss
        if first is None or loss is None:
            same = first is loss
        else:
            difference = abs(first - loss) / max(abs(first), abs(loss), 1e-12)
            same = difference <= max(self.relative, GROWTH * self._largest_difference)
            self._largest_difference = (
                max(self._largest_difference, difference) if same else self._largest_difference
            )
        if not same:
            self.add_violation(at_s, "loss", f"step {step} has loss {loss}, but had {first} before")

    def _check_generation(self, where: str, generation: int, at_s: float) -> None:
        """Check that generations never decrease. Events and states are checked separately, since one may
        overtake the other.
        """
        before = self._generations.get(where, 0)
        if generation < before:
            self.add_violation(at_s, "generation", f"{where}: generation {generation} came after {before}")
        self._generations[where] = max(before, generation)

    def _on_recovery(self, recovery: RecoveryDetails, at_s: float) -> None:
        self.recoveries.append(
            ObservedRecovery(
                at_s=round(at_s, 3),
                cause=recovery.cause,
                tier=recovery.tier,
                total_ms=recovery.total_ms,
                generation=recovery.generation,
                rolled_back_steps=recovery.rolled_back_steps,
            )
        )

    def _on_end(self, name: str, reason: str, at_s: float) -> None:
        if self.job is None or self.ended:
            return
        self.ended = name
        self._last_activity_s = max(self._last_activity_s, at_s)
        if name == "JobFailed" and not self.excused:
            self.add_violation(at_s, "failed", f"the job failed at step {self.step}: {reason}")

    def _on_lost(self, fact: DetectionFact) -> None:
        if fact.at <= self._affected_until.get(str(fact.node), -math.inf) + _FAULT_EFFECT_S:
            return
        detail = f"{fact.event} of {fact.node}, without an injected fault ({fact.how}): {fact.reason}"
        if fact.event == "TrainerLost" and fact.how in _BUG_CAUSES:
            self.add_violation(fact.at, "unprovoked", detail)
        else:
            self.unprovoked.append(detail)

    def _on_forbidden(self, fact: Fact, event: Json) -> None:
        topic = str((event.get("details") or {}).get("topic", ""))
        if fact.event == "MessageRejected" and any(part in topic for part in _IGNORED_REJECTIONS):
            return
        self.add_violation(
            fact.at, _FORBIDDEN_EVENTS[fact.event], f"{fact.event}: {fact.node or ''} {fact.reason}"
        )
