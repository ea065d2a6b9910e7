"""Makes the report out of the public events and states of a run.

Everything is matched when the report is built, not as it arrives: MQTT may deliver twice, and the event of
an injected fault may come after the recovery that it caused.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ftd.view.document import (
    EvaluationRecord,
    Fault,
    Final,
    JobFacts,
    Kept,
    Outcome,
    Pause,
    PipelineFacts,
    Processes,
    Recovery,
    Report,
    StepRecord,
)
from ftd.view.text import FAILURE_CAUSES, JsonMap

_OUTCOMES: dict[str, Outcome] = {"JobFinished": "finished", "JobFailed": "failed", "JobStopped": "stopped"}
_CHANGE_HOW = {
    "start": "submitted",
    "node_joined": "prepared",
    "node_returned": "prepared",
    "node_drained": "request",
    "speed_changed": "measured",
    "protection_changed": "request",
    "resumed": "prepared",
}
"""What sets a change in motion that is no failure."""
_SAME_MOMENT_S = 0.05
_KEPT = {
    "SnapshotCompleted": "snapshots",
    "SnapshotGivenUp": "snapshots",
    "CheckpointCompleted": "checkpoints",
    "CheckpointGivenUp": "checkpoints",
}
_DETECTIONS = frozenset({"NodeLost", "TrainerLost", "NodeDraining"})


def _keep_newest(by_step: dict[int, JsonMap], event: Mapping[str, Any]) -> None:
    """What was undone and done again counts as it was done last."""
    step = int(event["step"])
    before = by_step.get(step)
    if before is None or (event.get("generation") or 0) > (before.get("generation") or 0):
        by_step[step] = dict(event)


class ReportBuilder:
    """Feed it with ``on_event``, ``on_state`` and ``on_process``; ``build`` at any time."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._started_at: str | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._steps: dict[int, JsonMap] = {}
        self._evaluations: dict[int, JsonMap] = {}
        self._rollbacks: set[tuple[int, int]] = set()
        """(generation, step): what older generations did after this step is undone."""
        self._recoveries: dict[int, JsonMap] = {}
        self._decisions: dict[int, str] = {}
        self._faults: dict[tuple[str | None, float], JsonMap] = {}
        self._detections: list[JsonMap] = []
        self._pauses: dict[float, JsonMap] = {}
        self._kept: dict[tuple[str, float], JsonMap] = {}
        """What became of each snapshot and checkpoint, by kind and moment."""
        self._url: str | None = None
        self._end: JsonMap | None = None
        self._checksum: str | None = None
        self._processes: dict[str, tuple[list[int], dict[str, list[int]]]] = {}

    def on_state(self, state: Mapping[str, Any]) -> None:
        """The cluster's public state: tells the job."""
        job = state.get("job")
        if job:
            self._job |= {k: v for k, v in job.items() if v is not None}

    def on_event(self, event: Mapping[str, Any]) -> None:
        """One event envelope; a second delivery changes nothing."""
        at = float(event["monotonic"])
        if self._first_s is None or at < self._first_s:
            self._first_s, self._started_at = at, event.get("at")
        if self._end is None:
            self._last_s = max(self._last_s, at)
        details: JsonMap = event.get("details") or {}
        match event["event"]:
            case "JobSubmitted":
                self._job |= {k: v for k, v in details.items() if k in ("name", "steps", "global_batch")}
                self._job |= {"id": details["job"]} if "job" in details else {}
            case "StepCommitted":
                _keep_newest(self._steps, event)
            case "Evaluated":
                _keep_newest(self._evaluations, event)
            case "RolledBack":
                self._rollbacks.add((int(event["generation"]), int(details["to_step"])))
            case "RecoveryCompleted":
                self._recoveries.setdefault(int(details["recovery"]["generation"]), event)
            case "Quiesced" if event.get("generation") is not None:
                self._decisions[int(event["generation"])] = str(details.get("decision"))
            case "ChaosInjected":
                self._faults.setdefault((event.get("node"), float(details.get("at", at))), event)
            case "ClusterPaused":
                self._pauses.setdefault(at, event)
            case "JobFinished" | "JobFailed" | "JobStopped":
                self._end = event
                self._checksum = details.get("checksum") or self._checksum
            case "TrainerStarted":
                self.on_process(event["node"], int(details["daemon_pid"]))
                self.on_process(event["node"], int(details["pid"]), int(details["device"]))
            case "CheckpointStarted":
                self._url = details.get("url")
            case name if name in _KEPT:
                self._kept.setdefault((_KEPT[name], at), event)
            case name if name in _DETECTIONS:
                self._detections.append(event)

    def on_process(self, node: str, pid: int, device: int | None = None) -> None:
        """A process id became known: of the node's daemon, or of the trainer of ``device``.

        After the last step nobody counts: trainers are started anew for the next job, and the news of that
        may overtake the news of the job's end.
        """
        steps = self._job.get("steps")
        if self._end is not None or (steps is not None and steps in self._steps):
            return
        daemons, trainers = self._processes.setdefault(node, ([], {}))
        known = daemons if device is None else trainers.setdefault(str(device), [])
        if pid not in known:
            known.append(pid)

    def build(self) -> Report:
        """The report of all that was seen so far."""
        owners = _attribute(self._faults, self._recoveries)
        recoveries = [
            self._recovery(event, [key for key, generations in owners.items() if generations[:1] == [number]])
            for number, event in sorted(self._recoveries.items())
        ]
        steps = tuple(self._step(s, e) for s, e in self._lasting(self._steps))
        end = self._end
        return Report(
            job=JobFacts(
                name=self._job.get("name"),
                job_id=self._job.get("id"),
                steps=self._job.get("steps"),
                global_batch=self._job.get("global_batch"),
            ),
            outcome=_OUTCOMES[end["event"]] if end else "unfinished",
            outcome_reason=str(end.get("reason") or "") if end else "the run ended before the job did",
            started_at=self._started_at,
            duration_s=self._since(self._last_s),
            steps=steps,
            start=next((r for r in recoveries if r.cause == "start"), None),
            recoveries=tuple(r for r in recoveries if r.cause != "start"),
            faults=tuple(self._fault(key, owners[key]) for key in sorted(owners, key=lambda k: k[1])),
            pauses=tuple(self._pause(at, e) for at, e in sorted(self._pauses.items())),
            processes={
                node: Processes(
                    daemon=tuple(daemons), trainers={d: tuple(p) for d, p in sorted(trainers.items())}
                )
                for node, (daemons, trainers) in sorted(self._processes.items())
            },
            final=Final(
                step=steps[-1].step if steps else 0,
                loss=steps[-1].loss if steps else None,
                checksum=self._checksum,
            ),
            snapshots=self._kept_of("snapshots"),
            checkpoints=self._kept_of("checkpoints"),
            evaluations=tuple(self._evaluation(s, e) for s, e in self._lasting(self._evaluations)),
        )

    def _lasting(self, by_step: Mapping[int, JsonMap]) -> list[tuple[int, JsonMap]]:
        """Return what no rollback undid, in the order of the steps."""
        return [
            (step, event)
            for step, event in sorted(by_step.items())
            if not any(
                step > to_step and (event.get("generation") or 0) < generation
                for generation, to_step in self._rollbacks
            )
        ]

    def _kept_of(self, kind: str) -> Kept:
        told = [event for (one, _), event in sorted(self._kept.items()) if one == kind]
        completed = [event for event in told if event["event"].endswith("Completed")]
        given_up = [event for event in told if event["event"].endswith("GivenUp")]
        newest: JsonMap = completed[-1] if completed else {}
        details: JsonMap = newest.get("details") or {}
        took = sorted(_told(completed, "took_s"))
        stalls = _told(completed, "stall_s")
        return Kept(
            completed=len(completed),
            given_up=len(given_up),
            newest_step=newest.get("step"),
            size_bytes=details.get("size_bytes"),
            how=details.get("protection") if kind == "snapshots" else self._url,
            last_problem=given_up[-1].get("reason") if given_up else None,
            took_s=_rounded(took[len(took) // 2]) if took else None,
            stall_s=_rounded(sum(stalls)) if stalls else None,
            longest_stall_s=_rounded(max(stalls)) if stalls else None,
        )

    def _since(self, at: float) -> float:
        return round(at - (self._first_s if self._first_s is not None else at), 6)

    def _evaluation(self, step: int, event: JsonMap) -> EvaluationRecord:
        details: JsonMap = event.get("details") or {}
        return EvaluationRecord(
            step=step,
            loss=_finite(details.get("loss")),
            weight=_finite(details.get("weight")),
            metrics={name: _finite(value) for name, value in (details.get("metrics") or {}).items()},
            took_s=_finite(details.get("took_s")),
            generation=event.get("generation"),
            at_s=self._since(float(event["monotonic"])),
        )

    def _step(self, step: int, event: JsonMap) -> StepRecord:
        details: JsonMap = event.get("details") or {}
        return StepRecord(
            step=step,
            loss=_finite(details.get("loss")),
            gradient_norm=_finite(details.get("gradient_norm")),
            skipped=bool(details.get("skipped")),
            step_s=_finite(details.get("step_s")),
            generation=event.get("generation"),
            at_s=self._since(float(event["monotonic"])),
            learning_rate=_finite(details.get("learning_rate")) or None,
            weight=_finite(details.get("weight")),
        )

    def _recovery(self, event: JsonMap, faults: Sequence[tuple[str | None, float]]) -> Recovery:
        told: JsonMap = event["details"]["recovery"]
        detected_at = float(told["detected_at"])
        fault_at = min([at for _, at in faults], default=None)
        if fault_at is None and told.get("fault_at") is not None:
            fault_at = float(told["fault_at"])
        if fault_at is not None and fault_at > detected_at:  # it struck when the recovery was under way
            fault_at = None
        waited_ms = detected_ms = None if fault_at is None else (detected_at - fault_at) * 1000
        how = self._noticed_by(told)
        if told["cause"] == "resumed" and fault_at is not None:
            # It was noticed before the pause that this ended.
            known = [d for node, at in faults if (d := self._detection(node, at, detected_at))]
            if known:
                first = min(known, key=_detected_at)
                how, detected_ms = _how(first), (_detected_at(first) - fault_at) * 1000
        measured_from: Literal["fault", "detection"] = "detection" if fault_at is None else "fault"
        step = int(told["step"])
        return Recovery(
            cause=told["cause"],
            node=next(iter(told["nodes"]), None),
            nodes=tuple(told["nodes"]),
            detected_how=how,
            measured_from=measured_from,
            at_s=self._since(detected_at),
            detected_ms=_rounded(detected_ms),
            quiesce_ms=round(told["quiesce_ms"], 3),
            plan_ms=round(told["plan_ms"], 3),
            state_ms=round(told["state_ms"], 3),
            resume_ms=round(told["resume_ms"], 3),
            total_ms=round((waited_ms or 0.0) + told["total_ms"], 3),
            commit_gap_ms=self._gap_ms(step),
            rolled_back_steps=told["rolled_back_steps"],
            recomputed_steps=told["recomputed_steps"],
            tier=told["tier"],
            bytes_moved=told["bytes_moved"],
            method=told.get("method") or "",
            reason=told.get("reason") or "",
            decision=self._decisions.get(int(told["generation"])),
            generation=told["generation"],
            generations_tried=told["generations_tried"],
            step=step,
            pipelines_before=_pipelines(told["pipelines_before"]),
            pipelines_after=_pipelines(told["pipelines_after"]),
        )

    def _noticed_by(self, told: JsonMap) -> str | None:
        """Of a lost trainer, how its node noticed; otherwise what the coordinator says."""
        begun_at, nodes = float(told["detected_at"]), told["nodes"]
        if told["cause"] == "trainer_lost" and nodes:
            first = self._detection(nodes[0], begun_at - _SAME_MOMENT_S, begun_at + _SAME_MOMENT_S)
            if first is not None:
                return _how(first)
        how: str | None = told.get("detected_how")
        return how or _CHANGE_HOW.get(told["cause"])

    def _gap_ms(self, step: int) -> float | None:
        before, after = self._steps.get(step), self._steps.get(step + 1)
        if before is None or after is None:
            return None
        return round((float(after["monotonic"]) - float(before["monotonic"])) * 1000, 3)

    def _fault(self, key: tuple[str | None, float], generations: Sequence[int]) -> Fault:
        node, at = key
        details: JsonMap = self._faults[key].get("details") or {}
        until = min((t for n, t in self._faults if n == node and t > at), default=math.inf)
        detected = self._detection(node, at, until)
        detected_ms = None if detected is None else (_detected_at(detected) - at) * 1000
        total_ms = None
        if generations:
            told: JsonMap = self._recoveries[generations[0]]["details"]["recovery"]
            total_ms = (float(told["detected_at"]) - at) * 1000 + float(told["total_ms"])
        return Fault(
            fault=str(details.get("fault", "?")),
            target=details.get("target"),
            device=details.get("device"),
            node=node,
            at_s=self._since(at),
            detected_how=_how(detected) if detected else None,
            detected_ms=_rounded(detected_ms),
            total_ms=_rounded(total_ms),
            generations=tuple(generations),
        )

    def _detection(self, node: str | None, after: float, before: float) -> JsonMap | None:
        hits = [d for d in self._detections if d.get("node") == node and after <= _detected_at(d) < before]
        return min(hits, key=_detected_at, default=None)

    def _pause(self, at: float, event: JsonMap) -> Pause:
        details: JsonMap = event.get("details") or {}
        return Pause(
            at_s=self._since(at),
            needed=details.get("needed"),
            present=details.get("present"),
            reason=str(event.get("reason") or ""),
        )


def _attribute(
    faults: Mapping[tuple[str | None, float], JsonMap], recoveries: Mapping[int, JsonMap]
) -> dict[tuple[str | None, float], list[int]]:
    """Which recoveries each fault led to, oldest first.

    A fault belongs to the first recovery from a failure (or, after ``term``, from a drain) of its node that
    was completed after it, and to all later ones of that node until the node's next fault. So one recovery
    may have several faults (two nodes at once) and one fault several recoveries (lost, later returned). What
    goes on after a pause got over all faults since the last one before, whichever nodes they struck.
    """
    owners: dict[tuple[str | None, float], list[int]] = {}
    for node, at in faults:
        until = min((t for n, t in faults if n == node and t > at), default=math.inf)
        mine = owners.setdefault((node, at), [])
        ended_at = -math.inf
        for generation, event in sorted(recoveries.items()):
            told: JsonMap = event["details"]["recovery"]
            before, ended_at = ended_at, float(told["detected_at"]) + float(told["total_ms"]) / 1000
            if told["cause"] == "resumed" and not mine and before <= at <= float(told["detected_at"]):
                mine.append(generation)
                continue
            completed_at = float(told["detected_at"]) + float(told["total_ms"]) / 1000
            if node not in told["nodes"] or completed_at < at or float(told["detected_at"]) >= until:
                continue
            if mine or told["cause"] in FAILURE_CAUSES or told["cause"] == "node_drained":
                mine.append(generation)
    return owners


def _told(events: Sequence[JsonMap], field: str) -> list[float]:
    """A detail of those events that have it."""
    return [float(v) for e in events if (v := (e.get("details") or {}).get(field)) is not None]


def _detected_at(detection: JsonMap) -> float:
    """When the coordinator knew, which may be a moment before it said so."""
    details: JsonMap = detection.get("details") or {}
    return float(details.get("detected_at", detection["monotonic"]))


def _how(detection: JsonMap) -> str:
    details: JsonMap = detection.get("details") or {}
    return str(details.get("how") or details.get("cause") or "drain")


def _pipelines(pipelines: Sequence[JsonMap]) -> tuple[PipelineFacts, ...]:
    return msgspec.convert(pipelines, tuple[PipelineFacts, ...])


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
