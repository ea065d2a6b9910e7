"""What the measuring processes say on stdout, one JSON object a line. No torch in here.

``python -m runtime.profiling.layer_profile`` answers with any number of ``Progress`` and then one
``LayerMeasurements``, ``python -m runtime.profiling.link_profile`` with ``Progress``, and then one
``LinkMeasurements``.
"""

import os
import statistics
from collections.abc import Callable, Sequence

import msgspec

from planner.values import ModelProfile

INVALID_EXIT = 2
"""Exit code when the user has to change something; the last line of stderr says what."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    done: int
    total: int


class TimingSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How far repeated measurements lie apart."""

    repeats: int
    minimum_ms: float
    lower_quartile_ms: float
    median_ms: float
    upper_quartile_ms: float
    maximum_ms: float


class RowTimings(msgspec.Struct, frozen=True, kw_only=True):
    """One layer on one device on so many rows."""

    rows: int
    forward: TimingSpread
    backward: TimingSpread


class LayerMeasurements(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A model measured layer by layer."""

    profile: ModelProfile
    names: tuple[str, ...]
    rows: tuple[tuple[RowTimings, ...], ...]
    """Of each layer, the whole microbatch first."""
    unmeasured: tuple[str, ...]
    """Why some layer could not be measured on fewer rows, in words."""
    unselectable: tuple[str, ...] = ()
    """Why some layer cannot be recomputed selectively, in words."""
    device: str
    torch_version: str


class LinkMeasurementRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``python -m runtime.profiling.link_profile`` reads on stdin."""

    port: int
    """Of the rendezvous server on this host."""
    token: str
    backend: str
    max_members: int
    """Of the largest group that is measured."""
    budget_s: float
    """About how long the measuring itself may take."""


class PointToPointTiming(msgspec.Struct, frozen=True, kw_only=True):
    """So many bytes from one device to another, one way."""

    size_bytes: int
    time: TimingSpread


class AllReduceTiming(msgspec.Struct, frozen=True, kw_only=True):
    """So many bytes summed over a group of devices."""

    members: int
    size_bytes: int
    time: TimingSpread


class LinkMeasurements(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The network; empty where there are not two devices to talk to each other."""

    where: str
    sent: tuple[PointToPointTiming, ...]
    reduced: tuple[AllReduceTiming, ...]


def spread_of(times_s: Sequence[float]) -> TimingSpread:
    """Of at least one measurement, in seconds."""
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
    """A function that writes a line of the answer. All else that is printed from now on goes to stderr: what
    the user's code says must not get between the lines."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(answer: msgspec.Struct) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    return say
