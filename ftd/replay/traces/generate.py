"""Availability traces from a failure model.

Every node is a renewal process: it runs until its next failure or preemption, is away for a while, returns, and its
clocks begin again at 0, so that a Weibull law with a shape below 1 makes nodes fail more often soon after they came.
Every rack is such a process too; when it fails, all its nodes that are there leave at one instant, and none of them
is back before the rack is. At time 0 all nodes have just started.

Each node and each rack draws from streams of its own, derived from the seed and its number. With more nodes, the
nodes before them therefore have the same failures as without.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ftd.config.validation import convert, read_toml, require_positive
from ftd.errors import ConfigurationError
from ftd.replay.traces.trace import MOST_NODES, Trace, TraceEvent

HOUR_S = 3600.0
SHORTEST_S = 0.001
"""Least time that a node stays or is away, in seconds; it keeps the node's events apart."""
SHAPES = (0.1, 10.0)
"""Range of Weibull shapes. Times between failures at LANL have shapes of 0.7 to 0.8 (Schroeder and Gibson, DSN 2006);
outside the range nearly all times are 0, or all are equal.
"""
MOST_SIGMA = 10.0
"""Largest σ of a lognormal law. Above it nearly all times are 0, and the square of a large one does not fit a float."""
MAX_EVENTS = 5_000_000
"""Most events that a model may be expected to give; more are a mistake in a unit."""

_FAILURES, _REPAIRS, _PREEMPTIONS, _REPLACEMENTS, _RACKS, _RACK_REPAIRS = range(6)

Draw = Callable[[], float]
"""Draws the next time of a law, in seconds."""


class FailureLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Law of the time until a node fails, from its start on."""

    mean_h: float
    """Mean time in hours."""
    law: Literal["exponential", "weibull"] = "exponential"
    shape: float | None = None
    """Shape of the Weibull law: with less than 1, nodes that started lately fail more often."""


class RackFailures(FailureLaw, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Law of the time until a rack fails, from its last return on, with all its nodes."""

    size: int
    """Nodes of one rack: the first ``size`` nodes are in the first rack, and so on."""


class AbsenceLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Law of the time until a node returns."""

    mean_h: float
    """Mean time in hours."""
    law: Literal["exponential", "constant", "lognormal"] = "exponential"
    """The repair times of real clusters are lognormal (Schroeder and Gibson, DSN 2006)."""
    sigma: float | None = None
    """Standard deviation of the logarithm of the lognormal law."""


class Preemptions(FailureLaw, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Law of the time until a spot instance is taken away, from its start on."""

    notice_s: float
    """Warning before it is taken away in seconds."""
    replacement: AbsenceLaw | None = None
    """Time until another instance replaces it; without it none does."""


class FailureModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster and how its nodes come and go.

    :raises ConfigurationError: a value makes no sense; names the key.
    """

    name: str = "generated"
    nodes: int
    duration_h: float
    """Length of the trace in hours."""
    failures: FailureLaw | None = None
    """Failures of single nodes, independent of each other."""
    racks: RackFailures | None = None
    """Failures of whole racks."""
    preemptions: Preemptions | None = None
    """Spot instances that are taken away."""
    repair: AbsenceLaw | None = None
    """Time until a failed node or rack returns; without it none does."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ConfigurationError(
                f"{self.nodes} is not allowed", field="nodes", remedy=f"write 1 to {MOST_NODES} nodes"
            )
        require_positive(self.duration_h, "duration_h")
        causes = {"failures": self.failures, "racks": self.racks, "preemptions": self.preemptions}
        if not any(causes.values()):
            raise ConfigurationError(
                "the model has no failures", remedy=f"give at least one of {', '.join(causes)}"
            )
        for key, law in causes.items():
            _check_law(law, key)
        if self.racks is not None and self.racks.size < 1:
            raise ConfigurationError(
                f"{self.racks.size} is not allowed", field="racks.size", remedy="write at least 1 node"
            )
        _check_law(self.repair, "repair")
        if self.preemptions is not None:
            _check_law(self.preemptions.replacement, "preemptions.replacement")
            if not 0 <= self.preemptions.notice_s < math.inf:
                raise ConfigurationError(
                    f"{self.preemptions.notice_s} is not allowed",
                    field="preemptions.notice_s",
                    remedy="write seconds, at least 0",
                )
        expected = sum(2 * self.nodes * self.duration_h / law.mean_h for law in causes.values() if law)
        if expected > MAX_EVENTS:
            raise ConfigurationError(
                f"the trace would have about {expected:.2g} events, more than {MAX_EVENTS}",
                field="duration_h",
                remedy="are the means and the duration in hours?",
            )


def read_failure_model(path: Path) -> FailureModel:
    """Return the failure model in a TOML file; its name is the file's unless the file gives one.

    :raises ConfigurationError: names the file, the key and the remedy.
    """
    return convert({"name": path.stem, **read_toml(path)}, FailureModel, where=path.name)


def generate(model: FailureModel, seed: int) -> Trace:
    """Return a trace of this model; the same seed gives the same trace.

    :raises ConfigurationError: the seed is negative.
    """
    if seed < 0:
        raise ConfigurationError(f"the seed {seed} is negative", remedy="give a whole number of at least 0")
    generator = _Generator(model=model, seed=seed, end_s=model.duration_h * HOUR_S)
    size = model.racks.size if model.racks else model.nodes
    events: list[TraceEvent] = []
    for rack in range(math.ceil(model.nodes / size)):
        outages = list(generator.rack_outages(rack))
        for index in range(rack * size, min((rack + 1) * size, model.nodes)):
            events += generator.node_events(index, outages)
    events.sort(key=lambda event: event.at_s)  # It is stable: the events of a node stay in their order.
    return Trace(
        name=model.name,
        source=f"failure model {model.name}, seed {seed}: {_summary(model)}",
        events=tuple(events),
        end_s=generator.end_s,
        notes=("The trace was generated from a failure model and not observed.",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outage:
    """Time in which a rack is down, in seconds from the start of the trace."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generator:
    model: FailureModel
    seed: int
    end_s: float

    def rack_outages(self, rack: int) -> Iterator[_Outage]:
        """Yield the outages of a rack; without a repair the first one does not end."""
        until_failure = self._draw_failure(self.model.racks, _RACKS, rack)
        until_return = self._draw_absence(self.model.repair, _RACK_REPAIRS, rack)
        at_s = until_failure()
        while at_s <= self.end_s:
            outage = _Outage(begin_s=at_s, end_s=at_s + until_return())
            yield outage
            at_s = outage.end_s + until_failure()

    def node_events(self, node: int, outages: list[_Outage]) -> Iterator[TraceEvent]:
        """Yield the events of a node whose rack has these outages."""
        name = f"n{node}"
        until_failure = self._draw_failure(self.model.failures, _FAILURES, node)
        until_preemption = self._draw_failure(self.model.preemptions, _PREEMPTIONS, node)
        until_repair = self._draw_absence(self.model.repair, _REPAIRS, node)
        replacement = self.model.preemptions.replacement if self.model.preemptions else None
        until_replacement = self._draw_absence(replacement, _REPLACEMENTS, node)
        notice_s = self.model.preemptions.notice_s if self.model.preemptions else 0.0
        later = iter([*outages, _Outage(begin_s=math.inf, end_s=math.inf)])
        outage = next(later)
        at_s = 0.0
        while at_s <= self.end_s:
            yield TraceEvent(at_s=at_s, kind="add", node=name)
            failure_s, preemption_s = at_s + until_failure(), at_s + until_preemption()
            gone_s = min(failure_s, preemption_s, outage.begin_s)
            if gone_s > self.end_s:
                return
            preempted = preemption_s < min(failure_s, outage.begin_s)
            yield TraceEvent(
                at_s=gone_s,
                kind="remove",
                node=name,
                notice_s=min(notice_s, preemption_s - at_s) if preempted else 0.0,
            )
            if preempted:
                at_s = gone_s + until_replacement()
            elif failure_s <= outage.begin_s:
                at_s = gone_s + until_repair()
            else:
                at_s = gone_s
            while outage.begin_s <= at_s < math.inf:  # The node is away when its rack fails, too.
                at_s = max(at_s, outage.end_s)
                outage = next(later)

    def _draw_failure(self, law: FailureLaw | None, stream: int, number: int) -> Draw:
        if law is None:
            return lambda: math.inf
        shape = 1.0 if law.shape is None else law.shape
        scale_s = law.mean_h * HOUR_S / math.gamma(1 + 1 / shape)
        random = self._stream(stream, number)
        return lambda: max(scale_s * float(random.weibull(shape)), SHORTEST_S)

    def _draw_absence(self, law: AbsenceLaw | None, stream: int, number: int) -> Draw:
        if law is None:
            return lambda: math.inf
        mean_s, sigma = law.mean_h * HOUR_S, law.sigma or 0.0
        random = self._stream(stream, number)
        match law.law:
            case "constant":
                return lambda: mean_s
            case "exponential":
                return lambda: max(float(random.exponential(mean_s)), SHORTEST_S)
            case "lognormal":
                # The mean of a lognormal law is exp(µ + σ²/2).
                mu = math.log(mean_s) - sigma**2 / 2
                return lambda: max(float(random.lognormal(mu, sigma)), SHORTEST_S)

    def _stream(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(stream, number)))


def _check_law(law: FailureLaw | AbsenceLaw | None, key: str) -> None:
    """Check the mean, and the further parameter that one of the laws needs and the others do not have."""
    if law is None:
        return
    require_positive(law.mean_h, f"{key}.mean_h")
    if isinstance(law, FailureLaw):
        name, value, needed_by = "shape", law.shape, "weibull"
    else:
        name, value, needed_by = "sigma", law.sigma, "lognormal"
    if (law.law == needed_by) != (value is not None):
        raise ConfigurationError(
            f"the law {law.law} has {'no' if value is not None else 'a'} {name}",
            field=f"{key}.{name}",
            remedy=f"give a {name} with the law {needed_by} and with no other",
        )
    if name == "sigma" and value is not None:
        require_positive(value, f"{key}.{name}")
        if value > MOST_SIGMA:
            raise ConfigurationError(
                f"{value} is not allowed",
                field=f"{key}.{name}",
                remedy=f"write a number above 0 and of at most {MOST_SIGMA:g}",
            )
    if name == "shape" and value is not None and not SHAPES[0] <= value <= SHAPES[1]:
        raise ConfigurationError(
            f"{value} is not allowed",
            field=f"{key}.{name}",
            remedy=f"write a number from {SHAPES[0]:g} to {SHAPES[1]:g}",
        )


def _summary(model: FailureModel) -> str:
    """Return the model in one line, for the trace's source."""
    parts = [f"{model.nodes} nodes"]
    laws = {
        "failures": model.failures,
        "rack failures": model.racks,
        "preemptions": model.preemptions,
        "repair": model.repair,
    }
    for name, law in laws.items():
        if law is not None:
            parts.append(f"{name} {law.law} with mean {law.mean_h:g} h")
    return ", ".join(parts)
