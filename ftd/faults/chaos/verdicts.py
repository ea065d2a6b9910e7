"""Was it as expected? A pure function of what is expected and what was seen; the measured value in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from ftd.faults.chaos import values as v
from ftd.faults.chaos.record import InjectedFault, ScenarioRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationStatus:
    """``met`` is ``None`` while it is open: what has to come has not come."""

    met: bool | None
    measured: str
    lasting: bool = False
    """It is met as long as nothing happens: whether it was can be said at the end only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """For the report. ``fault_id`` is the fault's id; empty: the whole scenario's."""

    fault_id: str
    description: str
    met: bool
    measured: str


def find(expected: v.Expectation, of: InjectedFault | None, record: ScenarioRecord) -> ExpectationStatus:
    """How it stands now.

    :param of: the fault that it belongs to; ``None``: to the whole scenario.
    """
    faults = [of] if of is not None else list(record.struck.values())
    since_s = of.at_s if of is not None else 0.0
    match expected:
        case v.ResumedWithin():
            return _resumed(expected, faults, record)
        case v.StepsLost(most=most):
            return _most("rolled_back_steps", most, faults, record)
        case v.StepsRecomputed(most=most):
            return _most("recomputed_steps", most, faults, record)
        case v.RecoveryTier(allowed=allowed):
            return _one_of("tier", allowed, faults, record)
        case v.RecoveryCause(allowed=allowed):
            return _one_of("cause", allowed, faults, record)
        case v.RecoveryCount(most=most):
            count = len(record.recoveries(faults))
            return ExpectationStatus(met=count <= most, measured=str(count), lasting=True)
        case v.EventSeen(event=event):
            seen = record.since(since_s, event)
            if not seen:
                return ExpectationStatus(met=None, measured="not seen")
            return ExpectationStatus(met=True, measured=f"after {seen[0][0] - since_s:.2f} s")
        case v.EventNotSeen(event=event):
            seen = record.since(since_s, event)
            said = (
                f"{seen[0][1].get('node') or ''} {seen[0][1].get('reason')}".strip() if seen else "not seen"
            )
            return ExpectationStatus(met=not seen, measured=said, lasting=True)
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
            ended = record.ended
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
        return ExpectationStatus(met=None, measured="no fault has happened")
    last = max(faults, key=lambda one: one.at_s)
    recoveries = record.recoveries([last])
    if not recoveries:
        return ExpectationStatus(met=None, measured="no recovery")
    took_s = recoveries[0][0] - last.at_s
    return ExpectationStatus(met=took_s <= expected.limit_s, measured=f"{took_s:.2f} s")


def _most(
    field: str, most: int, faults: Sequence[InjectedFault], record: ScenarioRecord
) -> ExpectationStatus:
    counted = max((getattr(recovery, field) for _, recovery in record.recoveries(faults)), default=0)
    return ExpectationStatus(met=counted <= most, measured=str(counted), lasting=True)


def _one_of(
    field: str, allowed: tuple[str, ...], faults: Sequence[InjectedFault], record: ScenarioRecord
) -> ExpectationStatus:
    found = list(dict.fromkeys(getattr(recovery, field) for _, recovery in record.recoveries(faults)))
    return ExpectationStatus(
        met=any(one in allowed for one in found) or None, measured=", ".join(found) or "no recovery"
    )


def _same_losses(relative: float, record: ScenarioRecord) -> ExpectationStatus:
    both = sorted(record.losses.keys() & record.baseline.keys())
    if not record.baseline:
        return ExpectationStatus(met=False, measured="no run without faults to compare with")
    if not both:
        return ExpectationStatus(met=None, measured="no step yet")
    worst, step = max((_apart(record.losses[s], record.baseline[s]), s) for s in both)
    return ExpectationStatus(
        met=worst <= relative, measured=f"{len(both)} steps, {worst:.1e} apart at step {step}", lasting=True
    )


def _apart(loss: float, other: float) -> float:
    return abs(loss - other) / max(abs(loss), abs(other), 1e-300)


def open_ones(scenario: v.Scenario, record: ScenarioRecord) -> list[str]:
    """What has to come and has not."""
    return [what for _, what, finding in _findings(scenario, record) if finding.met is None]


def broken(scenario: v.Scenario, record: ScenarioRecord) -> bool:
    """Nothing that may still come can make it good."""
    return any(finding.met is False for _, _, finding in _findings(scenario, record))


def judge(scenario: v.Scenario, record: ScenarioRecord) -> tuple[Verdict, ...]:
    """At the end: every fault has happened, and every expectation; what is open is not met."""
    happened = []
    for fault in scenario.faults:
        struck = record.struck.get(fault.id)
        problem = "its moment never came" if struck is None else struck.problem
        said = problem or (f"at {struck.at_s:.2f} s" if struck is not None else "")
        happened.append(Verdict(fault_id=fault.id, description=str(fault), met=not problem, measured=said))
    expected = [
        Verdict(fault_id=of, description=what, met=finding.met is True, measured=finding.measured)
        for of, what, finding in _findings(scenario, record)
    ]
    return (*happened, *expected)


def _findings(scenario: v.Scenario, record: ScenarioRecord) -> list[tuple[str, str, ExpectationStatus]]:
    found = []
    for fault in scenario.faults:
        struck = record.struck.get(fault.id)
        for expected in fault.expect:
            finding = (
                ExpectationStatus(met=None, measured="the fault has not happened")
                if struck is None or struck.problem
                else find(expected, struck, record)
            )
            found.append((fault.id, str(expected), finding))
    return found + [("", str(one), find(one, None, record)) for one in scenario.expect]
