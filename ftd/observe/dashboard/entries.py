"""Entries of the page's lists, which only grow. That of an event is bounded in size, from any sender, and has its
text and its chapter.
"""

from collections import deque
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from ftd.observe.view.lines import event_text, event_title
from ftd.observe.view.story import ChapterIndex
from ftd.transport.wire.public import EventMessage, encode_json

Json = dict[str, Any]

MAX_NAME = 64
MAX_REASON = 1_000
MAX_DETAILS_BYTES = 2_000
MAX_NODES = 32
_BULKY = frozenset(
    {"pipelines", "pipelines_before", "pipelines_after", "considered", "layers", "replica_peers"}
)
"""Details whose size grows with the cluster; the page takes them from the state or does without."""


class NumberedEntries:
    """The newest entries of a list, numbered from 1 in their field ``n``."""

    def __init__(self, most: int) -> None:
        self.newest: deque[Json] = deque(maxlen=most)
        self.count = 0
        """Number of entries that were ever added."""
        self._taken = 0

    def add(self, entry: Json) -> None:
        self.count += 1
        self.newest.append({"n": self.count, **entry})

    def last(self, count: int) -> list[Json]:
        """Return the last ``count`` entries, as far as they are kept."""
        return [self.newest[index] for index in range(-min(count, len(self.newest)), 0)]

    def take(self) -> list[Json]:
        """Return the entries that were added since the previous call, as far as they are kept."""
        fresh = self.last(self.count - self._taken)
        self._taken = self.count
        return fresh


def build_entry(message: EventMessage, index: ChapterIndex) -> Json:
    """Return the list entry of an event. A node's event may contain anything."""
    name = message.event[:MAX_NAME]
    node = message.node[:MAX_NAME] if message.node else None
    plain = asdict(message) | {"event": name, "cause": message.cause[:MAX_NAME], "node": node}
    return {
        "event": name,
        "words": event_title(plain),
        "severity": message.severity,
        "node": node,
        "nodes": _nodes(message.details),
        "generation": message.generation,
        "step": message.step,
        "at": seconds(message.at),
        "chapter": index.of(plain),
        "text": _text(plain)[:MAX_REASON],
        "details": _abridge(message.details),
        "source": message.source or message.node or "",
    }


def seconds(at: str) -> float:
    """Return an ISO-8601 timestamp as seconds since 1970; the present time if it is malformed."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return datetime.now(UTC).timestamp()


def _text(event: Json) -> str:
    try:
        return event_text(event["event"], event)
    except (KeyError, TypeError, ValueError, AttributeError):
        # A node's event under the name of a coordinator's event.
        return " ".join(event["reason"].split())


def _nodes(details: Json) -> list[str]:
    """Return the nodes of a recovery, which the event names in addition to its own node."""
    recovery = details.get("recovery")
    nodes = recovery.get("nodes") if isinstance(recovery, dict) else None
    return [str(n)[:MAX_NAME] for n in nodes[:MAX_NODES]] if isinstance(nodes, list | tuple) else []


def _abridge(details: Json) -> Json | None:
    """Return the details without those whose size grows with the cluster; ``None`` if they are still too
    large.
    """
    retained = {key: value for key, value in details.items() if key not in _BULKY and key != "recovery"}
    recovery = details.get("recovery")
    if isinstance(recovery, dict):
        retained["recovery"] = {key: value for key, value in recovery.items() if key not in _BULKY}
    return retained if len(encode_json(retained)) <= MAX_DETAILS_BYTES else None
