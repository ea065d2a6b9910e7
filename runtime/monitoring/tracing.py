"""Traces of a trainer: what its threads did when, recorded only on request.

A *span* is a kind, a beginning and an end. While nothing is recorded, a span costs one attribute access.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from statemachine.messages.trace import SpanData, Trace, Traced

MAX_SPANS = 10_000
"""Limit for one request: half a MiB as JSON. Further spans are counted but not kept."""
MAX_STEPS = 1_000

KINDS = (
    "step", "forward", "backward", "bubble", "sync", "vote", "apply", "snapshot", "stall", "help", "copy",
)  # fmt: skip
"""Kinds of spans. ``copy`` runs on the copier's thread, the others on the main thread:

* ``step``: a whole step; ``forward`` and ``backward``: those of a microbatch (on CUDA: until they were
  enqueued);
* ``bubble``, ``sync``, ``vote``: waiting for a neighbour's activations or gradients, for sums, for all
  ranks;
* ``apply``: the optimizer; ``snapshot``: copies at the commit; ``stall``: waiting for copies;
* ``copy``, ``help``: one slice, with the bytes that were read for it.
"""


class TraceRecorder:
    """The traces of one trainer. The main thread sets and clears ``on``; other threads may ``add`` meanwhile."""

    def __init__(self) -> None:
        self.on = False
        self._active: Trace | None = None
        self._requested: Trace | None = None
        self._spans: list[SpanData] = []
        self._dropped = 0
        self._first_step = 0

    def request(self, request: Trace) -> None:
        """Request a recording from ``first_step`` or the next step on. Any thread may call this; a newer
        request replaces an older.
        """
        self._requested = request

    @contextmanager
    def span(self, kind: str, number: int = 0) -> Iterator[None]:
        """Record what the caller does within this context.
        :param number: the microbatch, or the step.
        """
        if not self.on:
            yield
            return
        began_s = time.time()
        try:
            yield
        finally:
            self.add(kind, began_s, time.time(), number)

    def add(self, kind: str, began_s: float, ended_s: float, number: int = 0, size_bytes: int = 0) -> None:
        """Record a span; times are those of ``time.time``, which the processes of a host share."""
        if not self.on:
            return
        if len(self._spans) >= MAX_SPANS:
            self._dropped += 1
            return
        self._spans.append(
            SpanData(
                kind=kind,
                began_us=round(1e6 * began_s),
                took_us=max(0, round(1e6 * (ended_s - began_s))),
                number=number,
                size_bytes=size_bytes,
            )
        )

    # --- main thread -------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Start a requested recording, if it is due, before ``step`` is computed."""
        requested = self._requested
        if requested is not None and step >= requested.first_step:
            self._requested, self._active = None, requested
            self._spans, self._dropped, self._first_step = [], 0, step
            self.on = True

    def end_step(self, generation: int, rank: int, step: int, *, over: bool = False) -> Traced | None:
        """Return the recording if ``step``, which was committed, is the last one requested, otherwise
        ``None``.

        :param over: no step follows in this generation, so return what has been recorded.
        """
        active = self._active
        if active is None or (step - self._first_step + 1 < active.steps and not over):
            return None
        self.on, self._active = False, None
        spans, self._spans = self._spans, []
        return Traced(
            request=active.request,
            generation=generation,
            rank=rank,
            spans=tuple(spans),
            dropped=self._dropped,
        )
