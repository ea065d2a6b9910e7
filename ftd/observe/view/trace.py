"""Converts the trace of a run: aligns the clocks of the hosts, writes Chrome's event format, and sums up
copies.

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
    """Time since the beginning of the trace."""
    took_us: float
    number: int
    size_bytes: int

    @property
    def ended_us(self) -> float:
        return self.began_us + self.took_us


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The spans of one trainer."""

    name: str
    """The trainer's device, ``node/device``."""
    rank: int
    position: str
    """The trainer's position in the plan, such as ``pipeline A, stage 2``; empty if unknown."""
    spans: tuple[TraceSpan, ...]
    dropped: int = 0

    def spans_of(self, *kinds: str) -> list[TraceSpan]:
        return [span for span in self.spans if span.kind in kinds]

    @property
    def steps(self) -> set[int]:
        return {span.number for span in self.spans_of("step")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedBytes:
    """Bytes of snapshots by when they were copied."""

    waiting_bytes: int = 0
    """Bytes that were copied while the main thread waited for other ranks."""
    overlapped_bytes: int = 0
    """Bytes that were copied while the main thread computed."""
    stalled_bytes: int = 0
    """Bytes that were copied while training waited for the snapshot."""

    @property
    def total_bytes(self) -> int:
        return self.waiting_bytes + self.overlapped_bytes + self.stalled_bytes


def align_traces(traces: Sequence[TraceData], positions: dict[str, str]) -> list[RankTrace]:
    """Return the traces ordered by rank, with times since the earliest beginning.

    No rank passes a vote before all ranks have reached it, so a step's vote ends at the same moment on all
    hosts. The clocks are aligned by these moments.

    :param positions: position in the plan by ``node/device``.
    """
    rows = [
        RankTrace(
            name=f"{data.node}/{data.device}",
            rank=data.rank,
            position=positions.get(f"{data.node}/{data.device}", ""),
            spans=tuple(
                TraceSpan(kind=kind, began_us=began, took_us=took, number=number, size_bytes=size)
                for kind, began, took, number, size in sorted(data.spans, key=lambda s: (s[1], -s[2]))
            ),
            dropped=data.dropped,
        )
        for data in sorted(traces, key=lambda data: data.rank)
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


def sum_copied_bytes(rows: Sequence[RankTrace]) -> CopiedBytes:
    """Sum the copied bytes of traces. A copy that overlaps a wait in part counts in part."""
    waiting = total = 0.0
    for row in rows:
        waits = row.spans_of(*WAITS)
        for span in row.spans_of("copy"):
            overlaps = (min(span.ended_us, w.ended_us) - max(span.began_us, w.began_us) for w in waits)
            inside = sum(max(0.0, overlap) for overlap in overlaps)
            waiting += span.size_bytes * (min(1.0, inside / span.took_us) if span.took_us else 0.0)
            total += span.size_bytes
    return CopiedBytes(
        waiting_bytes=round(waiting),
        overlapped_bytes=round(total - waiting),
        stalled_bytes=sum(span.size_bytes for row in rows for span in row.spans_of("help")),
    )


def chrome_trace(rows: Sequence[RankTrace], *, name: str) -> str:
    """Return the traces as JSON text: one process for each rank, with the threads ``main`` and ``copier``."""
    events: list[dict[str, Any]] = []
    for row in rows:
        label = " · ".join(filter(None, (f"rank {row.rank}", row.name, row.position)))
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
    """Return the end of each step's vote."""
    return {
        step.number: max(ends)
        for step in row.spans_of("step")
        if (
            ends := [v.ended_us for v in row.spans_of("vote") if step.began_us <= v.began_us <= step.ended_us]
        )
    }


def _shift(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return the offset to add to their times; 0 without a common vote."""
    both = ours.keys() & theirs.keys()
    return statistics.median(ours[step] - theirs[step] for step in both) if both else 0.0
