"""A node's health checks: when they run, and what waits for them.

The node tests its devices when its daemon starts, and when its trainers failed by a cause that counts for a
quarantine. ``Prepared`` waits for that check, so that a node whose device is bad is in no plan. The coordinator
orders further checks while the node is idle; they stop as soon as the node gets work, since the test of a device
would slow its trainer down.
"""

import msgspec

from statemachine.agent.state import IN_GROUP, Agent, TrainerPhase
from statemachine.effects import RunHealthCheck, StopHealthCheck
from statemachine.error_text import is_crash
from statemachine.messages.cluster import CheckHealth, HealthChecked
from statemachine.messages.values import FailureCause, HealthReport

_BUSY = IN_GROUP | {TrainerPhase.QUIESCING}


def check_before_work(a: Agent) -> None:
    """Start a check that must end before this node counts as prepared."""
    if a.facts.checks_health:
        _start(a, CheckHealth(), awaited=True, ordered=False)


def check_after_failure(a: Agent, cause: FailureCause, detail: str) -> None:
    """Start a check if the device may be the cause of a trainer's failure."""
    if cause in ("raised", "hung") or (cause == "exited" and is_crash(detail)):
        check_before_work(a)


def obey_order(a: Agent, order: CheckHealth) -> None:
    """Run a check that the coordinator ordered, unless this node works or runs one already."""
    busy = any(trainer.phase in _BUSY for trainer in a.trainers)
    if a.facts.checks_health and not a.checking and not busy:
        _start(a, order, awaited=a.job is not None and not a.built, ordered=True)


def _start(a: Agent, order: CheckHealth, *, awaited: bool, ordered: bool) -> None:
    a.check_number += 1
    a.checking, a.check_awaited, a.check_ordered = True, awaited, ordered
    a.out.append(RunHealthCheck(cause=a.cause, number=a.check_number, peers=order.peers))


def stop_check(a: Agent) -> None:
    """Stop a check for which nothing waits, because the node gets work."""
    if a.checking and not a.check_awaited:
        a.checking = False
        a.out.append(StopHealthCheck(cause=a.cause))


def note_ended(a: Agent, report: HealthReport) -> bool:
    """Report the result of a check, and return whether the node waited for it."""
    if not a.checking or report.number != a.check_number:
        return False
    awaited = a.check_awaited
    a.checking = a.check_awaited = False
    a.health = report if a.check_ordered else _with_earlier_faults(a.health, report)
    a.send(HealthChecked(report=a.health))
    return awaited


def _with_earlier_faults(earlier: HealthReport | None, report: HealthReport) -> HealthReport:
    """Return a report in which devices that were wrong before still are.

    Without an order of the coordinator in between, it may know nothing of the earlier result.
    """
    wrong = {one.device: one.wrong for one in earlier.devices} if earlier is not None else {}
    devices = tuple(
        msgspec.structs.replace(one, wrong=one.wrong or wrong.get(one.device, "")) for one in report.devices
    )
    return msgspec.structs.replace(report, devices=devices)
