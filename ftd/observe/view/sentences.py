"""Describes recoveries in sentences, for the summary, the report's page and ``ftd story``."""

from datetime import datetime, timedelta

from ftd.observe.view.document import Report, ReportedRecovery
from ftd.observe.view.text import CAUSE_WORDS, TIER_WORDS, format_duration, format_size, how_words, plural

_DECISIONS = {
    "roll_forward": "every rank held complete gradients of step {next}: all applied it, and nothing was computed again",
    "redo": "no rank had passed the vote of step {next}, so all computed it again",
    "boundary": "all stopped together after step {step}",
}


def describe_change(recovery: ReportedRecovery, report: Report) -> tuple[str, str, str]:
    """Return who was concerned, what happened to them, and the injected faults in parentheses, if any."""
    faults = [f for f in report.faults if f.generations[:1] == (recovery.generation,)]
    injected = f" ({', '.join(dict.fromkeys(f.fault for f in faults))})" if faults else ""
    words = CAUSE_WORDS.get(recovery.cause, recovery.cause)
    who = ", ".join(recovery.nodes)
    if recovery.cause != "resumed":
        return who or "cluster", f" {words}", injected
    if recovery.rolled_back_steps:
        return who or "the last copy", " lost and back", injected
    return words, f" with {who}" if who else "", injected


def describe_uneventful_run(report: Report) -> str:
    """Return a sentence about a run without recoveries."""
    if not report.steps:
        return "No step was committed."
    if report.pauses:
        return "No recovery was completed: the cluster paused."
    return "There was no failure, join or drain: one plan was used from the first step on."


def describe_decision(recovery: ReportedRecovery) -> str | None:
    """Return what happened to the undone steps or to the step in flight."""
    if recovery.rolled_back_steps:
        source = TIER_WORDS.get(recovery.tier, recovery.tier)
        undone = plural(recovery.rolled_back_steps, "committed step")
        return (
            f"no live replica was left: back to step {recovery.step} with {source}; "
            f"{undone} undone and computed again"
        )
    sentence = _DECISIONS.get(recovery.decision or "")
    return sentence.format(step=recovery.step, next=_in_flight(recovery)) if sentence else None


def describe_attempts(recovery: ReportedRecovery) -> str | None:
    """Return a sentence if the recovery took more than one generation."""
    if recovery.generations_tried < 2:
        return None
    return f"{recovery.generations_tried} generations, because something else changed before a step was committed"


def describe_recovery(recovery: ReportedRecovery, report: Report) -> list[str]:
    """Return the sentences of one recovery: what was noticed, stopped, decided and moved, and how long it
    took.
    """
    who, became, injected = describe_change(recovery, report)
    noticed = how_words(recovery.detected_how)
    if recovery.detected_ms is not None:
        noticed += f", {_ms(recovery.detected_ms)} after the fault"
    begin = "the fault" if recovery.measured_from == "fault" else "that moment"
    parts = [
        f"{_clock(report, recovery.at_s)}: {who}{became}{injected} at step {recovery.step}; "
        f"noticed by: {noticed}.",
        _stopped(recovery),
        f"The plan took {_ms(recovery.plan_ms)} ({recovery.method or 'as before'}): "
        f"{recovery.reason.rstrip('.') or 'no reason was given'}.",
        _moved(recovery),
        f"Step {recovery.step + 1} was committed {_ms(recovery.resume_ms)} later: in all "
        f"{_ms(recovery.total_ms)} from {begin}, "
        f"{plural(recovery.rolled_back_steps, 'committed step')} lost, "
        f"{plural(recovery.recomputed_steps, 'step')} in flight computed again.",
    ]
    if (more := describe_attempts(recovery)) is not None:
        parts.append(f"It took {more}.")
    return parts


def _stopped(recovery: ReportedRecovery) -> str:
    why = describe_decision(recovery)
    stopped = f"All others had stopped and reported after {_ms(recovery.quiesce_ms)}"
    return f"{stopped}: {why}." if why else f"{stopped}."


def _moved(recovery: ReportedRecovery) -> str:
    took = _ms(recovery.state_ms)
    if not recovery.bytes_moved:
        return f"No state had to move; all had met after {took}."
    source = TIER_WORDS.get(recovery.tier, "live replicas")
    return f"{format_size(recovery.bytes_moved)} of state came from {source}; all had met and held it after {took}."


def _ms(value_ms: float) -> str:
    return format_duration(value_ms / 1000)


def _clock(report: Report, at_s: float) -> str:
    if report.started_at is None:
        return f"After {at_s:.1f} s"
    began = datetime.fromisoformat(report.started_at)
    return (began + timedelta(seconds=at_s)).strftime("%Y-%m-%d %H:%M:%S UTC")


def _in_flight(recovery: ReportedRecovery) -> int:
    """Return the step that was in flight: after a roll-forward, the one from which training continued."""
    return recovery.step if recovery.decision == "roll_forward" else recovery.step + 1
