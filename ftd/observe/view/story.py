"""``ftd story NODE``: what happened to a node, and why.

Every event carries the id of what caused it (``cause``). A recovery spans several causes, since each
answer of a node is a new fact, but its events carry its generation. So the events are put into chapters:
same cause, same chapter; a step of a recovery goes to the chapter in which its generation began. A chapter
belongs to a node's story when any of its events names the node.
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

MOST_GENERATIONS = 10_000
"""Remembered with what they began for, the newest."""


def render_story(events: Iterable[JsonMap], node: str) -> RenderableType:
    """The chapters of ``node``, oldest first; in each, how long after its beginning things happened."""
    told = chapters(events, node)
    if not told:
        return Text(f"Nothing is known of a node named {node}.", style="yellow")
    count = sum(len(c) for c in told)
    parts: list[RenderableType] = [
        Text.assemble((f"The story of {node}", "bold"), f": {plural(count, 'event')}")
    ]
    for chapter in told:
        parts += ["", _title(chapter), _lines(chapter, node)]
    return Group(*parts)


def chapters(events: Iterable[JsonMap], node: str) -> list[list[JsonMap]]:
    """The events of ``node``'s story in chapters, each in order of time; repeated deliveries once."""
    known = {_identity(e): e for e in events if e.get("event") not in QUIET_EVENTS}
    ordered = sorted(known.values(), key=lambda e: float(e["monotonic"]))
    index = ChapterIndex()
    by_cause: dict[str, list[JsonMap]] = {}
    for event in ordered:
        by_cause.setdefault(index.of(event), []).append(event)
    return [chapter for chapter in by_cause.values() if any(names(e, node) for e in chapter)]


class ChapterIndex:
    """Which chapter each event belongs to; it is shown them in order of time."""

    def __init__(self) -> None:
        self._beginnings: dict[Any, str] = {}

    def of(self, event: JsonMap) -> str:
        """The cause that the chapter goes by: of a step of a recovery, what its generation began for."""
        cause, generation = str(event["cause"]), event.get("generation")
        if event["event"] == "GenerationStarted" and generation is not None:
            while len(self._beginnings) >= MOST_GENERATIONS:
                del self._beginnings[next(iter(self._beginnings))]
            self._beginnings.setdefault(generation, cause)
        if event["event"] in _OF_A_RECOVERY:
            return self._beginnings.get(generation, cause)
        return cause


def names(event: JsonMap, node: str) -> bool:
    """True when the event is about this node: its own, or in the list of a recovery's nodes."""
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


def _lines(chapter: Sequence[JsonMap], node: str) -> Table:
    begun_s = float(chapter[0]["monotonic"])
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=12, justify="right", style="dim")
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    for index, event in enumerate(chapter):
        after_s = float(event["monotonic"]) - begun_s
        mine = names(event, node)
        line = event_line(event, with_clock=False)
        line.no_wrap = False
        grid.add_row(
            "" if index == 0 else f"+{format_duration(after_s)}",
            Text("▌" if mine else "│", style="bold" if mine else "dim"),
            line,
        )
    return grid
