"""Messages by which a node asks its trainers for a trace of their steps (``runtime.monitoring.tracing``).
This module does not import torch.
"""

import msgspec

from statemachine.messages.common import Message


class Trace(Message, frozen=True, kw_only=True):
    """Request to record what happens in ``steps`` steps from ``first_step`` on, or from the next one, and then
    to answer Traced.
    """

    request: str
    first_step: int
    steps: int


class SpanData(msgspec.Struct, frozen=True, array_like=True):
    """One recorded span; ``runtime.monitoring.tracing`` lists the kinds. Times are in microseconds,
    ``began_us`` since the epoch.
    """

    kind: str
    began_us: int
    took_us: int
    number: int = 0
    size_bytes: int = 0


class Traced(Message, frozen=True, kw_only=True):
    """The spans that were recorded for a Trace. They cover fewer steps if the generation ended before."""

    request: str
    generation: int
    rank: int
    spans: tuple[SpanData, ...]
    dropped: int
    """Number of spans for which there was no room."""
