"""Frames by which a node asks its trainers what they do when (``runtime.monitoring.tracing``). No torch in
here."""

import msgspec

from statemachine.messages.base import Message


class Trace(Message, frozen=True, kw_only=True):
    """Record what is done in ``steps`` steps from ``first_step`` on, or from the next; then say Traced."""

    request: str
    first_step: int
    steps: int


class SpanData(msgspec.Struct, frozen=True, array_like=True):
    """``runtime.monitoring.tracing`` says the kinds. Times in microseconds, ``began_us`` since the epoch."""

    kind: str
    began_us: int
    took_us: int
    number: int = 0
    size_bytes: int = 0


class Traced(Message, frozen=True, kw_only=True):
    """What was recorded for a Trace; of fewer steps where the generation ended before."""

    request: str
    generation: int
    rank: int
    spans: tuple[SpanData, ...]
    dropped: int
    """Spans that there was no room for."""
