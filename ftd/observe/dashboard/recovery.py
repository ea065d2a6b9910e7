"""Recoveries in the page's JSON: the one in progress, and those that are complete."""

from ftd.observe.dashboard.entries import MAX_NODES, MAX_REASON, Json
from ftd.observe.run_model import START, DetectionFact, RecoveryCompletedFact, RecoveryTimeline
from ftd.observe.view.phases import shown_phases_ms
from ftd.observe.view.text import CAUSE_WORDS

_DROPPED = ("pipelines_before", "pipelines_after")


def encode_recovery(timeline: RecoveryTimeline | None) -> Json | None:
    """Return a recovery in progress. Each element of ``phases`` is ``[name, began_s, ended_s or None]``."""
    if timeline is None:
        return None
    return {
        "generation": timeline.generation,
        "attempts": timeline.attempts,
        "step": timeline.step,
        "mode": timeline.mode,
        "start": timeline.cause == START,
        "reason": timeline.reason[:MAX_REASON],
        "losses": [_loss_json(loss) for loss in timeline.losses],
        "phases": [list(phase) for phase in timeline.phases],
        "decision": _short(timeline.decision),
        "plan": _short(timeline.plan),
        "paused": _short(timeline.pause_reason),
    }


def encode_completed(fact: RecoveryCompletedFact, details: Json) -> Json:
    """Return a completed recovery.
    :param details: ``recovery`` in the details of its event.
    """
    timeline, recovery = fact.timeline, fact.recovery
    return {
        **{key: value for key, value in details.items() if key not in _DROPPED},
        "nodes": list(recovery.nodes)[:MAX_NODES],
        "at": fact.at,
        "phases": list(shown_phases_ms(recovery).items()),
        "change": CAUSE_WORDS.get(recovery.cause, recovery.cause),
        "failure": recovery.failure,
        "decision": _short(timeline.decision) if timeline is not None else None,
        "losses": [_loss_json(loss) for loss in timeline.losses] if timeline is not None else [],
    }


def _loss_json(loss: DetectionFact) -> Json:
    return {
        "node": loss.node or "",
        "event": loss.event,
        "how": loss.how,
        "at": loss.at,
        "fault_at": loss.fault_at,
        "reason": loss.reason[:MAX_REASON],
        "error": loss.error[:MAX_REASON],
        "log": f"{loss.log} on {loss.host}"[:MAX_REASON] if loss.log else "",
    }


def _short(text: str | None) -> str | None:
    return None if text is None else text[:MAX_REASON]
