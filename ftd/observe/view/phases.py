"""The phases of a recovery as numbers to show: rounded so that those that are shown add up to the shown total."""

from collections.abc import Iterable

from ftd.observe.run_model import RecoveryDetails, phases_ms
from ftd.observe.view.document import Report, ReportedRecovery
from statemachine.messages.values import RECOVERY_PHASES


def shown_phases_ms(recovery: RecoveryDetails | ReportedRecovery, unit_ms: float = 0.0) -> dict[str, float]:
    """Return the duration of each phase that occurred, in multiples of ``unit_ms``.

    The time since the begin is rounded at the end of each phase, and a phase is the difference of two such
    times. Phases that the recovery did not have are left out: the detection if it is measured from there, and
    the wait if training was not paused.

    :param unit_ms: milliseconds; 0 takes the unit in which ``format_duration`` shows the total.
    """
    unit_ms = unit_ms or _unit_ms(recovery.total_ms)
    shown: dict[str, float] = {}
    since_ms, before = 0.0, 0
    for phase, took_ms in phases_ms(recovery).items():
        since_ms += took_ms
        end = round(round(since_ms, 3) / unit_ms)
        if took_ms or not (phase == "wait" or (phase == "detect" and recovery.detected_ms is None)):
            shown[phase] = (end - before) * unit_ms
        before = end
    return shown


def _unit_ms(total_ms: float) -> float:
    if total_ms < 999.5:
        return 1.0
    return 10.0 if total_ms < 10_000 else 100.0 if total_ms < 60_000 else 1000.0


def shown_phases(report: Report) -> list[str]:
    """Return the phases that a table of these recoveries needs: the wait only if training was paused."""
    waited = any(recovery.waited_ms for recovery in report.recoveries)
    return [phase for phase in RECOVERY_PHASES if waited or phase != "wait"]


def phase_cells(recovery: ReportedRecovery, phases: Iterable[str]) -> list[str]:
    """Return the milliseconds of these phases and their total; ``–`` for a phase that the recovery did not have."""
    shown = shown_phases_ms(recovery, 1.0)
    cells = [f"{shown[phase]:.0f}" if phase in shown else "–" for phase in phases]
    return [*cells, f"{sum(shown.values()):.0f}"]
