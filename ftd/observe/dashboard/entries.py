"""An event as the page gets it: small, whoever sent it, with its words and the chapter of its story."""

from datetime import UTC, datetime
from typing import Any

from ftd.observe.view.lines import event_text
from ftd.observe.view.story import ChapterIndex
from ftd.observe.view.text import event_words
from ftd.transport.wire.public import EventMessage, encode_json

Json = dict[str, Any]

MAX_NAME = 64
MOST_REASON = 1_000
MOST_DETAILS_BYTES = 2_000
MOST_NODES = 32
_BULKY = frozenset(
    {"pipelines", "pipelines_before", "pipelines_after", "considered", "layers", "replica_peers"}
)
"""As long as the cluster is large; the page knows them from the state, or does without."""


def entry_of(message: EventMessage, number: int, index: ChapterIndex) -> Json:
    """What the list of events shows of one. It may be a node's, and then say anything."""
    name = message.event[:MAX_NAME]
    plain = {
        "event": name,
        "cause": message.cause[:MAX_NAME],
        "generation": message.generation,
        "node": message.node[:MAX_NAME] if message.node else None,
        "step": message.step,
        "reason": message.reason,
        "details": message.details,
    }
    return {
        "n": number,
        "event": name,
        "words": event_words(name),
        "severity": message.severity,
        "node": plain["node"],
        "nodes": _nodes(message.details),
        "generation": message.generation,
        "step": message.step,
        "at": seconds(message.at),
        "chapter": index.of(plain),
        "said": _said(plain)[:MOST_REASON],
        "details": _small(message.details),
        "source": message.source or message.node or "",
    }


def seconds(at: str) -> float:
    """An ISO-8601 stamp as seconds since 1970; now, where it is none."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return datetime.now(UTC).timestamp()


def _said(event: Json) -> str:
    try:
        return event_text(event["event"], event)
    except (KeyError, TypeError, ValueError, AttributeError):  # A node's event of the coordinator's name.
        return " ".join(event["reason"].split())


def _nodes(details: Json) -> list[str]:
    """Those of a recovery, beside the event's own."""
    recovery = details.get("recovery")
    nodes = recovery.get("nodes") if isinstance(recovery, dict) else None
    return [str(n)[:MAX_NAME] for n in nodes[:MOST_NODES]] if isinstance(nodes, list | tuple) else []


def _small(details: Json) -> Json | None:
    """Without what is as long as the cluster is large; ``None`` where that is not enough."""
    kept = {key: value for key, value in details.items() if key not in _BULKY and key != "recovery"}
    recovery = details.get("recovery")
    if isinstance(recovery, dict):
        kept["recovery"] = {key: value for key, value in recovery.items() if key not in _BULKY}
    return kept if len(encode_json(kept)) <= MOST_DETAILS_BYTES else None
