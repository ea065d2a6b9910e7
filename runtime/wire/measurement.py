"""The messages that measuring processes print on stdout, one JSON object per line. The module does not import
torch.

``python -m runtime.profiling.layer_profile`` prints any number of ``MeasurementProgress`` and then one
``LayerMeasurements``; ``python -m runtime.profiling.link_profile`` prints ``MeasurementProgress`` and then
one ``LinkMeasurements``.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from planner.values import ModelProfile

MAX_DEVICES = 1024
"""Largest number of devices of one stage."""

# The upper limits keep every sum that the planner makes finite and every size inside 64 bits.
MAX_MS = 1e9
MAX_BYTES = 2**50
MAX_COUNT = 2**31
TimeMs = Annotated[float, msgspec.Meta(ge=0, le=MAX_MS)]
SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]

INVALID_EXIT = 2
"""Exit code if the user has to change something; the last line of stderr says what."""


class MeasurementProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The number of measurements done, and how many there are."""

    done: int
    total: int


class TimingSpread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distribution of repeated measurements, in ascending order."""

    repeats: Count
    minimum_ms: TimeMs
    lower_quartile_ms: TimeMs
    median_ms: TimeMs
    upper_quartile_ms: TimeMs
    maximum_ms: TimeMs


class RowTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one layer on one device for a number of rows."""

    rows: Count
    forward: TimingSpread
    backward: TimingSpread


class LayerMeasurements(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Measurements of a model, layer by layer."""

    profile: ModelProfile
    names: tuple[str, ...]
    rows: tuple[tuple[RowTimings, ...], ...]
    """Measurements of each layer; those of the whole microbatch come first."""
    unmeasured: tuple[str, ...]
    """Sentences that say why a layer could not be measured on fewer rows."""
    unselectable: tuple[str, ...] = ()
    """Sentences that say why a layer cannot be recomputed selectively."""
    device: str
    torch_version: str


class LinkMeasurementRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request that ``python -m runtime.profiling.link_profile`` reads from stdin."""

    port: int
    """Port of the rendezvous server on this host."""
    token: str
    backend: str
    max_members: int
    """Size of the largest group that is measured."""
    budget_s: float
    """Approximate limit of the time for all measurements, in seconds."""


class PointToPointTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of sending a number of bytes from one device to another, in one direction."""

    size_bytes: SizeBytes
    time: TimingSpread


class AllReduceTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of summing a number of bytes over a group of devices."""

    members: Annotated[int, msgspec.Meta(ge=2, le=MAX_DEVICES)]
    size_bytes: SizeBytes
    time: TimingSpread


class LinkMeasurements(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Measurements of the network; empty if there are not two devices that could communicate."""

    where: str
    sent: tuple[PointToPointTiming, ...]
    reduced: tuple[AllReduceTiming, ...]


def spread_of(times_s: Sequence[float]) -> TimingSpread:
    """Return the distribution of at least one measurement, in seconds."""
    times_ms = sorted(1e3 * time_s for time_s in times_s)
    if len(times_ms) == 1:
        lower = median = upper = times_ms[0]
    else:
        lower, median, upper = statistics.quantiles(times_ms, n=4, method="inclusive")
    return TimingSpread(
        repeats=len(times_ms),
        minimum_ms=times_ms[0],
        lower_quartile_ms=min(max(lower, times_ms[0]), median),
        median_ms=median,
        upper_quartile_ms=max(min(upper, times_ms[-1]), median),
        maximum_ms=times_ms[-1],
    )


def claim_stdout() -> Callable[[msgspec.Struct], None]:
    """Return a function that prints a message on stdout, and redirect everything else to stderr.

    The user's code may print, which must not end up between the messages.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(answer: msgspec.Struct) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    return say
