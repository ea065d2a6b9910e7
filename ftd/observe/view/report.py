"""Builds the report of a run from its public events and states.

Events are related to each other when the report is built, not as they arrive: MQTT may deliver an event
twice, and the event of an injected fault may arrive after the recovery that it caused.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ftd.observe.run_model import (
    FAILURE_CAUSES,
    DetectionFact,
    EvaluatedFact,
    Fact,
    RecoveryDetails,
    RunModel,
    StepCommittedFact,
)
from ftd.observe.view.document import (
    FinalState,
    Outcome,
    Report,
    ReportedEvaluation,
    ReportedFailure,
    ReportedFault,
    ReportedJob,
    ReportedPause,
    ReportedPipeline,
    ReportedProcesses,
    ReportedQuarantine,
    ReportedRecovery,
    ReportedStep,
    SaveSummary,
)
from ftd.observe.view.text import JsonMap
from statemachine.error_text import mask_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OUTCOMES: dict[str, Outcome] = {"JobFinished": "finished", "JobFailed": "failed", "JobStopped": "stopped"}
_CHANGE_HOW = {
    "node_joined": "prepared",
    "node_returned": "prepared",
    "node_drained": "request",
    "speed_changed": "measured",
    "protection_changed": "request",
    "resumed": "prepared",
    "loss_spike": "measured",
}
"""Circumstance of a change that is not a failure, by its cause. A start has none."""
_AFTER_THE_END = frozenset(
    {"CheckpointAbandoned", "CheckpointExportFailed", "CheckpointSkipped", "LoggingFailed"}
)
"""Failures that are the job's own although its last step is done."""
_SAME_MOMENT_S = 0.05
MAX_EVENTS = 20_000
"""Largest number of events in a report; the newest stay."""
_LAYOUTS = frozenset({"pipelines", "considered", "pipelines_before", "pipelines_after"})
"""Details that the report has elsewhere, and whose size grows with the cluster."""

Reported = TypeVar("Reported", bound="DataclassInstance")


def build_report(run: RunModel) -> Report:
    """Return the report of everything that was seen of a run so far."""
    return _Builder(run).build()


class _Builder:
    """A renderer of one run; its times count from the first event."""

    def __init__(self, run: RunModel) -> None:
        self._run = run

    def build(self) -> Report:
        """Return the report of everything that was seen so far."""
        run, job, end = self._run, self._run.job, self._run.ended
        owners = _attribute(run)
        steps = tuple(self._step(one) for one in run.exclude_undone(run.steps))
        return Report(
            job=_reported(ReportedJob, job, job_id=job.id),
            outcome=_OUTCOMES[end.event] if end else "unfinished",
            outcome_reason=end.reason if end else "the run ended before the job did",
            started_at=run.first_event_time,
            duration_s=self._since(run.last_at),
            steps=steps,
            start=self._recovery(run.start.recovery) if run.start is not None else None,
            recoveries=tuple(self._recovery(one.recovery) for _, one in sorted(run.recoveries.items())),
            faults=tuple(
                self._fault(key, owners[key])
                for key in sorted(owners, key=lambda k: k[1])
                if self._concerns_job(run.faults[key])
            ),
            quarantined=tuple(
                _reported(ReportedQuarantine, one, node=str(one.node), at_s=self._since(one.at))
                for one in run.quarantined.values()
                if self._concerns_job(one)
            ),
            pauses=tuple(
                _reported(ReportedPause, one, at_s=self._since(one.at))
                for one in sorted(run.pauses, key=lambda one: one.at)
            ),
            processes={
                node: ReportedProcesses(
                    daemon=tuple(known.daemon),
                    trainers={str(device): tuple(pids) for device, pids in sorted(known.trainers.items())},
                )
                for node, known in sorted(run.processes.items())
            },
            final=FinalState(
                step=steps[-1].step if steps else 0,
                loss=steps[-1].loss if steps else None,
                checksum=end.checksum if end else None,
            ),
            snapshots=self._summarise_saves("snapshots"),
            checkpoints=self._summarise_saves("checkpoints"),
            evaluations=tuple(self._evaluation(one) for one in run.exclude_undone(run.evaluations)),
            failures=self._failures(),
            events=tuple(_without_layouts(event) for event in run.events[-MAX_EVENTS:]),
        )

    def _concerns_job(self, fact: Fact) -> bool:
        """Return whether the fact belongs to the job: afterwards, the cluster waits for the next one."""
        end = self._run.ended
        return end is None or fact.at <= end.at or fact.event in _AFTER_THE_END

    def _failures(self) -> tuple[ReportedFailure, ...]:
        """Return the failures with their reasons; those of a node that differ in numbers at most are one entry."""
        alike: dict[tuple[str, str | None, str, str], list[Fact]] = {}
        for fact in sorted(filter(self._concerns_job, self._run.problems), key=lambda fact: fact.at):
            cause, error = (fact.how, fact.error) if isinstance(fact, DetectionFact) else ("", "")
            key = (fact.event, fact.node, cause, mask_numbers(error or _first_line(fact.reason)))
            alike.setdefault(key, []).append(fact)
        return tuple(self._failure(*key[:3], facts) for key, facts in alike.items())

    def _failure(self, event: str, node: str | None, cause: str, facts: Sequence[Fact]) -> ReportedFailure:
        last = facts[-1]
        trainer = last if isinstance(last, DetectionFact) else None
        return ReportedFailure(
            event=event,
            node=node,
            cause=cause,
            error=(trainer.error if trainer is not None else "") or _first_line(last.reason),
            times=len(facts),
            injected=all(self._was_injected(fact) for fact in facts),
            first_at_s=self._since(facts[0].at),
            last_at_s=self._since(last.at),
            detail=trainer.detail if trainer is not None else "",
            host=trainer.host if trainer is not None else "",
            log=trainer.log if trainer is not None else "",
        )

    def _was_injected(self, fact: Fact) -> bool:
        """Return whether a fault that was injected into this node caused this failure."""
        since = fact.fault_at if isinstance(fact, DetectionFact) and fact.fault_at is not None else fact.at
        return any(node == fact.node and abs(since - at) < _SAME_MOMENT_S for node, at in self._run.faults)

    def _summarise_saves(self, kind: str) -> SaveSummary:
        details = sorted((one for one in self._run.saves if one.kind == kind), key=lambda one: one.at)
        completed = [one for one in details if one.completed]
        given_up = [one for one in details if not one.completed]
        newest = completed[-1] if completed else None
        took = sorted(one.took_s for one in completed if one.took_s is not None)
        stalls = [one.stall_s for one in completed if one.stall_s is not None]
        protection = newest.protection if newest is not None else None
        return SaveSummary(
            completed=len(completed),
            abandoned=len(given_up),
            newest_step=newest.step if newest is not None else None,
            size_bytes=newest.size_bytes if newest is not None else None,
            protection_or_location=protection if kind == "snapshots" else self._run.checkpoint_url,
            last_abandon_reason=given_up[-1].reason if given_up else None,
            median_s=_rounded(took[len(took) // 2]) if took else None,
            total_stall_s=_rounded(sum(stalls)) if stalls else None,
            longest_stall_s=_rounded(max(stalls)) if stalls else None,
        )

    def _since(self, at: float) -> float:
        began_at = self._run.first_at
        return round(at - began_at, 6) if began_at is not None else 0.0

    def _evaluation(self, fact: EvaluatedFact) -> ReportedEvaluation:
        metrics = {name: _finite(value) for name, value in (fact.metrics or {}).items()}
        return _reported(ReportedEvaluation, fact, metrics=metrics, at_s=self._since(fact.at))

    def _step(self, fact: StepCommittedFact) -> ReportedStep:
        return _reported(
            ReportedStep, fact, at_s=self._since(fact.at), learning_rate=_finite(fact.learning_rate) or None
        )

    def _recovery(self, details: RecoveryDetails) -> ReportedRecovery:
        return _reported(
            ReportedRecovery,
            details,
            node=next(iter(details.nodes), None),
            nodes=tuple(details.nodes),
            detected_how=self._noticed_by(details),
            at_s=self._since(details.detected_at),
            commit_gap_ms=self._gap_ms(details),
            method=details.method or "",
            reason=details.reason or "",
            decision=self._run.decisions.get(details.generation),
            pipelines_before=_pipelines(details.pipelines_before),
            pipelines_after=_pipelines(details.pipelines_after),
        )

    def _noticed_by(self, details: RecoveryDetails) -> str | None:
        """Return how the node of a lost trainer noticed the loss, or else what the coordinator reports."""
        if details.cause == "trainer_lost" and details.nodes:
            begun_at = details.detected_at
            first = self._detection(details.nodes[0], begun_at - _SAME_MOMENT_S, begun_at + _SAME_MOMENT_S)
            if first is not None:
                return first.how
        return details.detected_how or _CHANGE_HOW.get(details.cause)

    def _gap_ms(self, details: RecoveryDetails) -> float | None:
        before, after = self._run.steps.get(details.step), self._run.steps.get(details.step + 1)
        began_at = before.at if before is not None else None
        if details.rolled_back_steps > 0:  # Training was interrupted after the undone steps, not before them.
            first = details.generation - details.generations_tried
            undone = [
                one for one in self._run.rollbacks if first < (one.generation or 0) <= details.generation
            ]
            known = [one.last_commit_at for one in undone if one.last_commit_at is not None]
            began_at = max(known, default=None)
        return None if began_at is None or after is None else round((after.at - began_at) * 1000, 3)

    def _fault(self, key: tuple[str | None, float], generations: Sequence[int]) -> ReportedFault:
        run, (node, at) = self._run, key
        until = min((t for n, t in run.faults if n == node and t > at), default=math.inf)
        detected = self._detection(node, at, until)
        detected_ms = None if detected is None else (detected.detected_at - at) * 1000
        total_ms = None
        if generations:
            total_ms = (run.recoveries[generations[0]].recovery.completed_at - at) * 1000
        return _reported(
            ReportedFault,
            run.faults[key],
            at_s=self._since(at),
            detected_how=detected.how if detected else None,
            detected_ms=_rounded(detected_ms),
            total_ms=_rounded(total_ms),
            generations=tuple(generations),
        )

    def _detection(self, node: str | None, after: float, before: float) -> DetectionFact | None:
        hits = [one for one in self._run.detections if one.node == node and after <= one.detected_at < before]
        return min(hits, key=lambda one: one.detected_at, default=None)


def _attribute(run: RunModel) -> dict[tuple[str | None, float], list[int]]:
    """Return the generations of the recoveries that each fault led to, oldest first.

    A fault belongs to the first recovery from a failure (or, after ``term``, from a drain) of its node that
    was completed after it, and to all later ones of that node until the node's next fault. So one recovery
    may have several faults (two nodes at once), and one fault several recoveries (lost, later returned). A
    recovery that ends a pause belongs to all faults since the previous recovery, whichever nodes they hit.
    """
    owners: dict[tuple[str | None, float], list[int]] = {}
    for node, at in run.faults:
        until = min((t for n, t in run.faults if n == node and t > at), default=math.inf)
        owned = owners.setdefault((node, at), [])
        ended_at = -math.inf
        for generation, one in sorted(run.recoveries.items()):
            details = one.recovery
            before, ended_at = ended_at, details.completed_at
            if details.cause == "resumed" and not owned and before <= at <= details.detected_at:
                owned.append(generation)
                continue
            if node not in details.nodes or details.completed_at < at or details.detected_at >= until:
                continue
            if owned or details.cause in FAILURE_CAUSES or details.cause == "node_drained":
                owned.append(generation)
    return owners


def _reported(kind: type[Reported], of: object, **changed: Any) -> Reported:
    """Return the part of a report that has the same fields as ``of``, except for ``changed``. Numbers that are not
    finite, which JSON cannot express, become ``None``.
    """
    names = [one.name for one in fields(kind) if one.name not in changed]
    values = {name: getattr(of, name) for name in names}
    return kind(**{name: _finite(v) if isinstance(v, float) else v for name, v in values.items()} | changed)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _without_layouts(event: JsonMap) -> dict[str, Any]:
    """Return an event without the pipelines of plans and recoveries."""
    details = {key: value for key, value in (event.get("details") or {}).items() if key not in _LAYOUTS}
    if isinstance(recovery := details.get("recovery"), dict):
        details["recovery"] = {key: value for key, value in recovery.items() if key not in _LAYOUTS}
    return {**event, "details": details}


def _pipelines(pipelines: Sequence[JsonMap]) -> tuple[ReportedPipeline, ...]:
    return msgspec.convert(pipelines, tuple[ReportedPipeline, ...])


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
