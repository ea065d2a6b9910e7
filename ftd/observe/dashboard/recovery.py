"""The recoveries that the dashboard shows, as JSON: the one that is under way, and those that are over."""

from collections import deque
from typing import Any

from ftd.observe.dashboard.entries import MOST_NODES, MOST_REASON
from ftd.observe.run_model import Detection, RecoveryCompleted, RecoveryTimeline
from ftd.observe.view.text import CAUSE_WORDS

Json = dict[str, Any]

MOST_DONE = 50
_DROPPED = ("pipelines_before", "pipelines_after")


def course_json(course: RecoveryTimeline | None) -> Json | None:
    """Return a recovery that is under way as the page shows it: ``phases`` are ``[name, began_s, ended_s or None]``."""
    if course is None:
        return None
    return {
        "generation": course.generation,
        "tries": course.tries,
        "step": course.step,
        "mode": course.mode,
        "why": course.why[:MOST_REASON],
        "losses": [_loss_json(loss) for loss in course.losses],
        "phases": [list(phase) for phase in course.phases],
        "decision": _short(course.decision),
        "plan": _short(course.plan),
        "paused": _short(course.paused),
    }


class DoneRecoveries:
    """The newest recoveries that are over."""

    def __init__(self) -> None:
        self.done: deque[Json] = deque(maxlen=MOST_DONE)
        self.count = 0
        """Number of all that ever were in ``done``."""

    def add(self, fact: RecoveryCompleted, details: Json) -> None:
        """Add one, with the details of its event."""
        course, recovery = fact.course, fact.recovery
        losses = course.losses if course is not None else ()
        self.count += 1
        self.done.append(
            {
                **{key: value for key, value in details.items() if key not in _DROPPED},
                "nodes": list(recovery.nodes)[:MOST_NODES],
                "n": self.count,
                "at": fact.at,
                "detect_ms": min(
                    (1e3 * (x.at - x.fault_at) for x in losses if x.fault_at is not None), default=None
                ),
                "what": CAUSE_WORDS.get(recovery.cause, recovery.cause),
                "failure": recovery.failure,
                "decision": _short(course.decision) if course is not None else None,
                "losses": [_loss_json(loss) for loss in losses],
            }
        )


def _loss_json(loss: Detection) -> Json:
    return {
        "node": loss.node or "",
        "what": loss.event,
        "how": loss.how,
        "at": loss.at,
        "fault_at": loss.fault_at,
        "said": loss.reason[:MOST_REASON],
    }


def _short(text: str | None) -> str | None:
    return None if text is None else text[:MOST_REASON]
