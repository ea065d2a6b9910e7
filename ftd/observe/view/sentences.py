"""Describes recoveries in sentences, for the summary, the report's page and ``ftd story``."""

from datetime import datetime, timedelta

from ftd.observe.run_model import START
from ftd.observe.view.document import Report, ReportedFailure, ReportedRecovery
from ftd.observe.view.phases import shown_phases_ms
from ftd.observe.view.text import (
    CAUSE_WORDS,
    LOG_TITLES,
    TIER_WORDS,
    event_words,
    format_duration,
    format_size,
    how_words,
    notice_words,
    plural,
)
from statemachine.error_text import describe_failing_nodes as failing_nodes_words
from statemachine.messages.values import NodeErrors

_DECISIONS = {
    "roll_forward": "every rank held complete gradients of step {next}: all applied it, and nothing was computed again",
    "redo": "no rank had passed the vote of step {next}, so all computed it again",
    "boundary": "all stopped together after step {step}",
}

_ROLLBACKS = {
    "corruption": "wrong gradients have reached all replicas",
    "loss_spike": "the update of the spike is undone",
}
"""Reasons to undo steps although live replicas are left, by the cause of the recovery."""
_BEGINS = {"fault": "the fault", "estimate": "the last sign of life", "detection": "that moment"}
"""Begin of a recovery's duration, by ``measured_from``."""


def describe_change(recovery: ReportedRecovery, report: Report) -> tuple[str, str, str]:
    """Return who was concerned, what happened to them, and the injected faults in parentheses, if any."""
    faults = [f for f in report.faults if f.generations[:1] == (recovery.generation,)]
    injected = f" ({', '.join(dict.fromkeys(f.fault for f in faults))})" if faults else ""
    words = CAUSE_WORDS.get(recovery.cause, recovery.cause)
    who = ", ".join(recovery.nodes)
    if recovery.cause == START:
        return "training", f" began on {who}" if who else " began", injected
    if recovery.cause == "resumed" and recovery.rolled_back_steps:
        return who or "the last copy", " lost and back", injected
    return who or "cluster", f" {words}", injected


def describe_failing_nodes(report: Report) -> str:
    """Return which nodes' trainers failed without an injected fault, how often, and the most frequent error, in the
    words of ``JobFinished``; empty if none did.
    """
    by_node: dict[str, dict[str, int]] = {}
    for failure in report.failures:
        if failure.event == "TrainerLost" and not failure.injected:
            errors = by_node.setdefault(failure.node or "a node", {})
            errors[failure.error] = errors.get(failure.error, 0) + failure.times
    return failing_nodes_words(
        (node, NodeErrors(times=sum(errors.values()), errors=errors)) for node, errors in by_node.items()
    )


def describe_failure(failure: ReportedFailure) -> str:
    """Return what failed, how often, and why."""
    what = event_words(failure.event) + (f" ({how_words(failure.cause)})" if failure.cause else "")
    often = "" if failure.times == 1 else f", {failure.times} times"
    injected = ", injected" if failure.injected else ""
    return f"{failure.node or 'cluster'}: {what}{often}{injected}: {failure.error}"


def describe_log(failure: ReportedFailure) -> str:
    """Return where the full traceback or output is; empty if there is none outside of the report."""
    return f"{failure.log} on {failure.host}" if failure.log else ""


def describe_uneventful_run(report: Report) -> str:
    """Return a sentence about a run without recoveries."""
    if not report.steps:
        return "No step was committed."
    if report.pauses:
        return "No recovery was completed: the cluster paused."
    if report.failures:
        return "No recovery was completed."
    return "No failure, join or drain interrupted training: one plan was used from the first step on."


def describe_decision(recovery: ReportedRecovery) -> str | None:
    """Return what happened to the undone steps or to the step in flight."""
    if recovery.rolled_back_steps:
        source = TIER_WORDS.get(recovery.tier, recovery.tier)
        undone = plural(recovery.rolled_back_steps, "committed step")
        why = _ROLLBACKS.get(recovery.cause, "no live replica was left")
        return f"{why}: back to step {recovery.step} with {source}; {undone} undone and computed again"
    sentence = _DECISIONS.get(recovery.decision or "")
    # After a roll-forward, training continued from the step that was in flight.
    in_flight = recovery.step if recovery.decision == "roll_forward" else recovery.step + 1
    return sentence.format(step=recovery.step, next=in_flight) if sentence else None


def step_of(recovery: ReportedRecovery) -> int:
    """Return the last committed step when it happened, which a rollback undid."""
    return recovery.step + recovery.rolled_back_steps


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
    noticed = notice_words(recovery.detected_how)
    shown = shown_phases_ms(recovery)
    begin = _BEGINS[recovery.measured_from]
    if "detect" in shown:
        noticed += f", {_ms(shown['detect'])} after {begin}"
    lost = (
        f", {plural(recovery.rolled_back_steps, 'committed step')} lost, "
        f"{plural(recovery.recomputed_steps, 'step')} in flight computed again"
    )
    parts = [
        f"{_clock(report, recovery.at_s)}: {who}{became}{injected} at step {step_of(recovery)}{noticed}.",
        *describe_losses(recovery, report),
        *([f"Training was paused for {_ms(shown['wait'])}."] if "wait" in shown else []),
        _stopped(recovery, shown["quiesce"]),
        f"The plan took {_ms(shown['plan'])} ({recovery.method or 'as before'}): "
        f"{recovery.reason.rstrip('.') or 'no reason was given'}.",
        _moved(recovery, shown["state"]),
        f"Step {recovery.step + 1} was committed {_ms(shown['resume'])} later: in all "
        f"{_ms(recovery.total_ms)} from {begin}{'' if recovery.cause == START else lost}.",
    ]
    if (more := describe_attempts(recovery)) is not None:
        parts.append(f"It took {more}.")
    return parts


def describe_losses(recovery: ReportedRecovery, report: Report) -> list[str]:
    """Return a sentence for each loss that the recovery began with, if its event has an error or names a log."""
    first = recovery.generation - recovery.generations_tried
    started = [event for event in report.events if event.get("event") == "GenerationStarted"]
    causes = {
        event["cause"] for event in started if first < (event.get("generation") or 0) <= recovery.generation
    }
    found: dict[str, None] = {}
    for event in report.events:
        details = event.get("details") or {}
        if event.get("event") in LOG_TITLES and event.get("cause") in causes:
            log = (
                f"{LOG_TITLES[event['event']]}: {details['log']} on {details['host']}"
                if details.get("log")
                else ""
            )
            if text := "; ".join(filter(None, [details.get("error"), log])):
                found[f"{event.get('node')}: {text}."] = None
    return list(found)


def _stopped(recovery: ReportedRecovery, took_ms: float) -> str:
    if recovery.cause == START:
        return f"All had reported that they were ready after {_ms(took_ms)}."
    why = describe_decision(recovery)
    stopped = f"All others had stopped and reported after {_ms(took_ms)}"
    return f"{stopped}: {why}." if why else f"{stopped}."


def _moved(recovery: ReportedRecovery, took_ms: float) -> str:
    took = _ms(took_ms)
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
