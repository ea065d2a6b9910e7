"""What a recovery was, in sentences: for the summary, the report's page and ``ftd story``."""

from datetime import datetime, timedelta

from ftd.observe.view.document import Report, ReportedRecovery
from ftd.observe.view.text import CAUSE_WORDS, TIER_WORDS, format_duration, format_size, how_words, plural

_DECISIONS = {
    "roll_forward": "every rank held complete gradients of step {next}: all applied it, nothing was redone",
    "redo": "no rank had passed the vote of step {next}, so all did it again",
    "boundary": "all stopped together behind step {step}",
}


def what_happened(recovery: ReportedRecovery, report: Report) -> tuple[str, str, str]:
    """Who, what became of them, and the faults that were injected to that end, in brackets, or nothing."""
    faults = [f for f in report.faults if f.generations[:1] == (recovery.generation,)]
    injected = f" ({', '.join(dict.fromkeys(f.fault for f in faults))})" if faults else ""
    words = CAUSE_WORDS.get(recovery.cause, recovery.cause)
    who = ", ".join(recovery.nodes)
    if recovery.cause != "resumed":
        return who or "cluster", f" {words}", injected
    if recovery.rolled_back_steps:
        return who or "the last copy", " lost, and back", injected
    return words, f" with {who}" if who else "", injected


def uneventful(report: Report) -> str:
    """Of a run without recoveries."""
    if not report.steps:
        return "No step was committed."
    if report.pauses:
        return "No recovery came to its end: the cluster paused."
    return "No failure, no join, no drain: one plan from the first step on."


def decided(recovery: ReportedRecovery) -> str | None:
    """What became of the steps: those undone, or the one in flight."""
    if recovery.rolled_back_steps:
        source = TIER_WORDS.get(recovery.tier, recovery.tier)
        undone = plural(recovery.rolled_back_steps, "committed step")
        return (
            f"no live replica was left: back to step {recovery.step} by {source}; {undone} undone, and "
            "done again"
        )
    sentence = _DECISIONS.get(recovery.decision or "")
    return sentence.format(step=recovery.step, next=_in_flight(recovery)) if sentence else None


def tries(recovery: ReportedRecovery) -> str | None:
    """Said where one generation did not suffice."""
    if recovery.generations_tried < 2:
        return None
    return f"{recovery.generations_tried} generations: more changed before a step was committed"


def describe_recovery(recovery: ReportedRecovery, report: Report) -> list[str]:
    """The whole story of one recovery: what was noticed, stopped, decided, moved, and when it was over."""
    who, became, injected = what_happened(recovery, report)
    noticed = how_words(recovery.detected_how)
    if recovery.detected_ms is not None:
        noticed += f", {_ms(recovery.detected_ms)} after the fault"
    begin = "the fault" if recovery.measured_from == "fault" else "that moment"
    parts = [
        f"{_clock(report, recovery.at_s)}: {who}{became}{injected} at step {recovery.step}; "
        f"noticed by: {noticed}.",
        _stopped(recovery),
        f"The plan took {_ms(recovery.plan_ms)} ({recovery.method or 'as before'}): "
        f"{recovery.reason.rstrip('.') or 'no reason was told'}.",
        _moved(recovery),
        f"Step {recovery.step + 1} was committed {_ms(recovery.resume_ms)} later: in all "
        f"{_ms(recovery.total_ms)} from {begin}, "
        f"{plural(recovery.rolled_back_steps, 'committed step')} lost, "
        f"{plural(recovery.recomputed_steps, 'step')} in flight computed again.",
    ]
    if (more := tries(recovery)) is not None:
        parts.append(f"It took {more}.")
    return parts


def _stopped(recovery: ReportedRecovery) -> str:
    why = decided(recovery)
    stopped = f"All others had stopped and reported after {_ms(recovery.quiesce_ms)}"
    return f"{stopped}: {why}." if why else f"{stopped}."


def _moved(recovery: ReportedRecovery) -> str:
    took = _ms(recovery.state_ms)
    if not recovery.bytes_moved:
        return f"No state had to move; all had met after {took}."
    source = TIER_WORDS.get(recovery.tier, "replicas that were alive")
    return f"{format_size(recovery.bytes_moved)} of state came from {source}; all had met and held it after {took}."


def _ms(value_ms: float) -> str:
    return format_duration(value_ms / 1000)


def _clock(report: Report, at_s: float) -> str:
    if report.started_at is None:
        return f"After {at_s:.1f} s"
    began = datetime.fromisoformat(report.started_at)
    return (began + timedelta(seconds=at_s)).strftime("%Y-%m-%d %H:%M:%S UTC")


def _in_flight(recovery: ReportedRecovery) -> int:
    """The step that was in flight: after a roll-forward it is the one that was resumed from."""
    return recovery.step if recovery.decision == "roll_forward" else recovery.step + 1
