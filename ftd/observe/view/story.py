"""Renders ``ftd story NODE``: what happened to a node, and why.

Every event carries the id of what caused it (``cause``). A recovery spans several causes, since each answer
of a node is a new fact, but all its events carry its generation. Events are therefore grouped into
chapters: events with the same cause form a chapter, and the events of a recovery join the chapter in which
its generation began. A chapter belongs to a node's story if any of its events names the node.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.observe.view.lines import event_line
from ftd.observe.view.text import QUIET_EVENTS, JsonMap, format_clock, format_duration, plural

_OF_A_RECOVERY = frozenset(
    {"Quiesced", "PlanChosen", "ClusterPaused", "TrainingResumed", "RecoveryCompleted"}
)

MAX_GENERATIONS = 10_000
"""Number of newest generations whose cause is remembered."""


def render_story(events: Iterable[JsonMap], node: str | None = None) -> RenderableType:
    """Return the chapters of ``node``, or of all, oldest first, with times relative to the chapter's beginning."""
    found = chapters(events, node)
    if not found:
        nothing = f"Nothing is known of a node named {node}." if node else "The report has no events."
        return Text(nothing, style="yellow")
    count = sum(len(c) for c in found)
    parts: list[RenderableType] = [
        Text.assemble((f"The story of {node or 'the run'}", "bold"), f": {plural(count, 'event')}")
    ]
    for chapter in found:
        parts += ["", _title(chapter), _lines(chapter, node)]
    return Group(*parts)


def chapters(events: Iterable[JsonMap], node: str | None = None) -> list[list[JsonMap]]:
    """Return the events of ``node``'s story, or of all, in chapters, each in order of time and without repeated
    deliveries.
    """
    known = {_identity(e): e for e in events if e.get("event") not in QUIET_EVENTS}
    ordered = sorted(known.values(), key=lambda e: float(e["monotonic"]))
    index = ChapterIndex()
    by_cause: dict[str, list[JsonMap]] = {}
    for event in ordered:
        by_cause.setdefault(index.of(event), []).append(event)
    return [chapter for chapter in by_cause.values() if any(concerns(e, node) for e in chapter)]


class ChapterIndex:
    """An index that assigns events to chapters; events must be passed in order of time."""

    def __init__(self) -> None:
        self._beginnings: dict[Any, str] = {}

    def of(self, event: JsonMap) -> str:
        """Return the cause that identifies the event's chapter; in a recovery, the cause of its generation."""
        cause, generation = str(event["cause"]), event.get("generation")
        if event["event"] == "GenerationStarted" and generation is not None:
            while len(self._beginnings) >= MAX_GENERATIONS:
                del self._beginnings[next(iter(self._beginnings))]
            self._beginnings.setdefault(generation, cause)
        if event["event"] in _OF_A_RECOVERY:
            return self._beginnings.get(generation, cause)
        return cause


def concerns(event: JsonMap, node: str | None) -> bool:
    """Return whether the event is about this node, as its own node or among the nodes of a recovery; every event
    is about ``None``.
    """
    if node is None:
        return True
    recovery = (event.get("details") or {}).get("recovery") or {}
    return event.get("node") == node or node in recovery.get("nodes", ())


def _identity(event: JsonMap) -> tuple[object, ...]:
    return tuple(event.get(k) for k in ("monotonic", "event", "node", "generation", "step", "cause"))


def _title(chapter: Sequence[JsonMap]) -> Text:
    first, last = chapter[0], chapter[-1]
    took_s = float(last["monotonic"]) - float(first["monotonic"])
    title = Text(format_clock(first.get("at")), style="dim")
    if len(chapter) > 1:
        title.append(f"  {plural(len(chapter), 'event')} in {format_duration(took_s)}", style="dim")
    title.append(f"  (cause {first['cause']})", style="dim italic")
    return title


def _lines(chapter: Sequence[JsonMap], node: str | None) -> Table:
    begun_s = float(chapter[0]["monotonic"])
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=12, justify="right", style="dim")
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    for index, event in enumerate(chapter):
        after_s = float(event["monotonic"]) - begun_s
        concerned = concerns(event, node)
        line = event_line(event, with_clock=False)
        line.no_wrap = False
        grid.add_row(
            "" if index == 0 else f"+{format_duration(after_s)}",
            Text("▌" if concerned else "│", style="bold" if concerned else "dim"),
            line,
        )
    return grid
