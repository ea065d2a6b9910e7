"""The judgement of a scenario: a pure function of what is expected and what was observed, with the measured
values in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from ftd.faults.chaos import values as v
from ftd.faults.chaos.record import InjectedFault, ScenarioRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationStatus:
    """The current status of an expectation. ``met`` is ``None`` while it is open, that is, while it may still
    be met.
    """

    met: bool | None
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One line of the report. ``fault_id`` is empty if it concerns the whole scenario."""

    fault_id: str
    description: str
    met: bool
    measured: str


def assess(expected: v.Expectation, of: InjectedFault | None, record: ScenarioRecord) -> ExpectationStatus:
    """Return how an expectation stands now.

    :param of: the fault that it belongs to, or ``None`` if it belongs to the whole scenario.
    """
    faults = [of] if of is not None else list(record.injected.values())
    since_s = of.at_s if of is not None else 0.0
    match expected:
        case v.ResumedWithin():
            return _resumed(expected, faults, record)
        case v.StepsAtMost(field=field, maximum=most):
            counted = max((getattr(recovery, field) for _, recovery in record.recoveries(faults)), default=0)
            return ExpectationStatus(met=counted <= most, measured=str(counted))
        case v.RecoveryFrom(field=field, allowed=allowed):
            found = list(dict.fromkeys(getattr(one, field) for _, one in record.recoveries(faults)))
            return ExpectationStatus(
                met=any(one in allowed for one in found) or None, measured=", ".join(found) or "no recovery"
            )
        case v.RecoveryCount(maximum=most):
            count = len(record.recoveries(faults))
            return ExpectationStatus(met=count <= most, measured=str(count))
        case v.EventSeen(event=event):
            seen = record.since(since_s, event)
            if not seen:
                return ExpectationStatus(met=None, measured="not seen")
            return ExpectationStatus(met=True, measured=f"after {seen[0][0] - since_s:.2f} s")
        case v.EventNotSeen(event=event):
            seen = record.since(since_s, event)
            measured_text = (
                f"{seen[0][1].get('node') or ''} {seen[0][1].get('reason')}".strip() if seen else "not seen"
            )
            return ExpectationStatus(met=not seen, measured=measured_text)
        case v.NodeStates(states=states):
            nodes = record.state.get("nodes") or {}
            now = {name: (nodes.get(name) or {}).get("state", "unknown") for name, _ in states}
            holds = all(now[name] == state for name, state in states)
            return ExpectationStatus(
                met=holds or None, measured=", ".join(f"{n} {s}" for n, s in now.items())
            )
        case v.ClusterPhaseReached(phase=phase):
            now_in = str(record.state.get("phase"))
            return ExpectationStatus(met=(now_in == phase) or None, measured=now_in)
        case v.JobFinishes():
            ended = record.end_event
            return ExpectationStatus(
                met=None if not ended else ended == "JobFinished", measured=ended or "not yet"
            )
        case v.SameLosses(relative=relative):
            return _same_losses(relative, record)
        case _:
            assert_never(expected)


def _resumed(
    expected: v.ResumedWithin, faults: Sequence[InjectedFault], record: ScenarioRecord
) -> ExpectationStatus:
    if not faults:
        return ExpectationStatus(met=None, measured="no fault was injected")
    last = max(faults, key=lambda one: one.at_s)
    recoveries = record.recoveries([last])
    if not recoveries:
        return ExpectationStatus(met=None, measured="no recovery")
    completed_at_s, recovery = recoveries[0]
    if len(faults) == 1 and recovery.measured_from == "fault":
        took_s = recovery.total_ms / 1000
    else:  # The recovery's own duration counts from an earlier fault, or not from a fault.
        took_s = completed_at_s - last.at_s
    return ExpectationStatus(met=took_s <= expected.limit_s, measured=f"{took_s:.2f} s")


def _same_losses(relative: float, record: ScenarioRecord) -> ExpectationStatus:
    both = sorted(record.losses.keys() & record.baseline.keys())
    if not record.baseline:
        return ExpectationStatus(met=False, measured="no run without faults to compare with")
    if not both:
        return ExpectationStatus(met=None, measured="no step yet")
    worst, step = max((_apart(record.losses[s], record.baseline[s]), s) for s in both)
    # Until the job ends, wrong steps may be found, undone and computed again.
    return ExpectationStatus(
        met=worst <= relative or (False if record.end_event else None),
        measured=f"{len(both)} steps, {worst:.1e} apart at step {step}",
    )


def _apart(loss: float, other: float) -> float:
    return abs(loss - other) / max(abs(loss), abs(other), 1e-300)


def judge(scenario: v.Scenario, record: ScenarioRecord) -> tuple[Verdict, ...]:
    """Return the final verdicts on every fault and every expectation. An expectation that is still open is not
    met.
    """
    verdicts = []
    for fault in scenario.faults:
        injected = record.injected.get(fault.id)
        problem = "it was never due" if injected is None else injected.problem
        measured_text = problem or (f"at {injected.at_s:.2f} s" if injected is not None else "")
        verdicts.append(
            Verdict(fault_id=fault.id, description=str(fault), met=not problem, measured=measured_text)
        )
    expected = [
        Verdict(fault_id=of, description=what, met=finding.met is True, measured=finding.measured)
        for of, what, finding in find_statuses(scenario, record)
    ]
    return (*verdicts, *expected)


def find_statuses(scenario: v.Scenario, record: ScenarioRecord) -> list[tuple[str, str, ExpectationStatus]]:
    """Return the fault, the description and the current status of each expectation."""
    found = []
    for fault in scenario.faults:
        injected = record.injected.get(fault.id)
        for expected in fault.expect:
            finding = (
                ExpectationStatus(met=None, measured="the fault was not injected")
                if injected is None or injected.problem
                else assess(expected, injected, record)
            )
            found.append((fault.id, str(expected), finding))
    return found + [("", str(one), assess(one, None, record)) for one in scenario.expect]
