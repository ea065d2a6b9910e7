"""A run's own trace as data: the clocks of the hosts put on one scale, Chrome's event format, and sums.

The format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "Trace Event
Format") opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftd.transport.wire.public import TraceData

WAITS = ("bubble", "sync", "vote")
COPIES = ("copy", "help")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    kind: str
    began_us: float
    """From the beginning of the trace."""
    took_us: float
    number: int
    size_bytes: int

    @property
    def ended_us(self) -> float:
        return self.began_us + self.took_us


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one trainer did."""

    name: str
    """``node/device``."""
    rank: int
    place: str
    """``pipeline A, stage 2``; empty where it is not known."""
    spans: tuple[TraceSpan, ...]
    dropped: int = 0

    def of(self, *kinds: str) -> list[TraceSpan]:
        return [span for span in self.spans if span.kind in kinds]

    @property
    def steps(self) -> set[int]:
        return {span.number for span in self.of("step")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedBytes:
    """Bytes of snapshots by when they were copied."""

    waiting_bytes: int = 0
    """While the main thread waited for others."""
    beside_bytes: int = 0
    """Beside computing."""
    stalled_bytes: int = 0
    """While it waited for this."""

    @property
    def total_bytes(self) -> int:
        return self.waiting_bytes + self.beside_bytes + self.stalled_bytes


def align_traces(found: Sequence[TraceData], places: dict[str, str]) -> list[RankTrace]:
    """By rank; times count from the earliest beginning.

    No rank passes a vote before the last one has come to it, so the ends of a step's vote are one moment on
    all hosts: the clocks are put right by them.

    :param places: ``node/device`` → where in the plan.
    """
    rows = [
        RankTrace(
            name=f"{data.node}/{data.device}",
            rank=data.rank,
            place=places.get(f"{data.node}/{data.device}", ""),
            spans=tuple(
                TraceSpan(kind=kind, began_us=began, took_us=took, number=number, size_bytes=size)
                for kind, began, took, number, size in sorted(data.spans, key=lambda s: (s[1], -s[2]))
            ),
            dropped=data.dropped,
        )
        for data in sorted(found, key=lambda data: data.rank)
    ]
    votes = [_votes(row) for row in rows]
    shifts = [_shift(votes[0], theirs) for theirs in votes] if rows else []
    first = min(
        (s.began_us + shift for row, shift in zip(rows, shifts, strict=True) for s in row.spans), default=0.0
    )
    return [
        replace(row, spans=tuple(replace(s, began_us=s.began_us + shift - first) for s in row.spans))
        for row, shift in zip(rows, shifts, strict=True)
    ]


def copied(row: RankTrace) -> CopiedBytes:
    """A slice that is partly within a wait counts partly."""
    waits = row.of(*WAITS)
    waiting = total = 0.0
    for span in row.of("copy"):
        inside = sum(max(0.0, min(span.ended_us, w.ended_us) - max(span.began_us, w.began_us)) for w in waits)
        waiting += span.size_bytes * (min(1.0, inside / span.took_us) if span.took_us else 0.0)
        total += span.size_bytes
    return CopiedBytes(
        waiting_bytes=round(waiting),
        beside_bytes=round(total - waiting),
        stalled_bytes=sum(span.size_bytes for span in row.of("help")),
    )


def chrome_trace(rows: Sequence[RankTrace], *, name: str) -> str:
    """The whole as JSON text: a process for each rank, with the threads ``main`` and ``copier``."""
    events: list[dict[str, Any]] = []
    for row in rows:
        label = " · ".join(filter(None, (f"rank {row.rank}", row.name, row.place)))
        events += [
            _named("process_name", row.rank, 0, label),
            _named("thread_name", row.rank, 0, "main"),
            _named("thread_name", row.rank, 1, "copier"),
        ]
        events += [_event(row.rank, span) for span in row.spans]
    dropped = sum(row.dropped for row in rows)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"cluster": name, "spans that did not fit": dropped},
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _event(rank: int, span: TraceSpan) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    name = span.kind
    if span.kind in ("forward", "backward"):
        arguments["microbatch"] = span.number
    elif span.kind in ("step", "stall", *COPIES):
        arguments["step"] = span.number
        name = f"step {span.number}" if span.kind == "step" else span.kind
    if span.size_bytes:
        arguments["bytes"] = span.size_bytes
        if span.took_us:
            arguments["GB/s"] = round(span.size_bytes / span.took_us / 1e3, 2)
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "ts": round(span.began_us, 3),
        "dur": round(span.took_us, 3),
        "pid": rank,
        "tid": int(span.kind == "copy"),
        "args": arguments,
    }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _votes(row: RankTrace) -> dict[int, float]:
    """The end of each step's vote."""
    return {
        step.number: max(ends)
        for step in row.of("step")
        if (ends := [v.ended_us for v in row.of("vote") if step.began_us <= v.began_us <= step.ended_us])
    }


def _shift(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """To be added to their times; nothing where there is no vote in common."""
    both = ours.keys() & theirs.keys()
    return statistics.median(ours[step] - theirs[step] for step in both) if both else 0.0
