"""The run's own trace: what a trainer's threads did when, recorded only while somebody asked for it.

A *span* is a kind, a beginning and an end. While nothing is recorded, a span costs one look at an attribute.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from statemachine.messages.trace import SpanData, Trace, Traced

MAX_SPANS = 10_000
"""Of one request: half a MiB as JSON. Those behind are counted, not kept."""
MAX_STEPS = 1_000

KINDS = (
    "step", "forward", "backward", "bubble", "sync", "vote", "apply", "snapshot", "stall", "help", "copy",
)  # fmt: skip
"""``copy`` is on the copier's thread, the rest on the main thread:

* ``step``: all of a step; ``forward`` and ``backward``: of a microbatch (on CUDA: until it was ordered);
* ``bubble``, ``sync``, ``vote``: waiting for a neighbour's activations or gradients, for sums, for everybody;
* ``apply``: the optimizer; ``snapshot``: what is copied at the commit; ``stall``: waiting for copies;
* ``copy``, ``help``: one slice, with the bytes that were read for it.
"""


class TraceRecorder:
    """Of one trainer. ``on`` is set and cleared by the main thread; other threads may ``add`` meanwhile."""

    def __init__(self) -> None:
        self.on = False
        self._wanted: Trace | None = None
        self._asked: Trace | None = None
        self._spans: list[SpanData] = []
        self._dropped = 0
        self._first_step = 0

    def request(self, request: Trace) -> None:
        """From any thread: record, from its first step on or the next. A newer request replaces an older."""
        self._asked = request

    @contextmanager
    def span(self, kind: str, number: int = 0) -> Iterator[None]:
        """What the caller does inside. :param number: the microbatch, or the step."""
        if not self.on:
            yield
            return
        began_s = time.time()
        try:
            yield
        finally:
            self.add(kind, began_s, time.time(), number)

    def add(self, kind: str, began_s: float, ended_s: float, number: int = 0, size_bytes: int = 0) -> None:
        """Times are those of ``time.time``, which the processes of a host share."""
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
        """``step`` is about to be computed."""
        asked = self._asked
        if asked is not None and step >= asked.first_step:
            self._asked, self._wanted = None, asked
            self._spans, self._dropped, self._first_step = [], 0, step
            self.on = True

    def end_step(self, generation: int, rank: int, step: int, *, over: bool = False) -> Traced | None:
        """``step`` is committed. The answer, where it was the last that was asked for.

        :param over: no step follows in this generation: answer with what there is.
        """
        wanted = self._wanted
        if wanted is None or (step - self._first_step + 1 < wanted.steps and not over):
            return None
        self.on, self._wanted = False, None
        spans, self._spans = self._spans, []
        return Traced(
            request=wanted.request,
            generation=generation,
            rank=rank,
            spans=tuple(spans),
            dropped=self._dropped,
        )
