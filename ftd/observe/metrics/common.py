"""Metrics that coordinator and nodes have in common, and the buckets of all histograms."""

import platform
import re
from collections.abc import Callable, Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

import ftd
from statemachine.effects import EmitEvent

STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RECOVERY_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COPY_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WRITE_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)
ROUND_TRIP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

MAX_EVENT_NAMES = 128
"""Limit of event names: nodes send events too, and a node with stolen credentials may invent names."""
_NAME = re.compile(r"[A-Z][A-Za-z]{1,63}", re.ASCII)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class CommonMetrics:
    """A daemon's registry, with the metrics that every daemon has: build, broker, bugs, process."""

    def __init__(
        self, component: str, *, connected: Callable[[], bool], internal_errors: Callable[[], int]
    ) -> None:
        """:param component: ``coordinator`` or ``node``."""
        self.registry = CollectorRegistry()
        build = self.gauge(
            "ftd_build_info",
            "Always 1; the labels name the daemon and its versions.",
            "component",
            "version",
            "python",
        )
        build.labels(component, ftd.__version__, platform.python_version()).set(1)
        up = self.gauge(
            "ftd_broker_connected", "1 while the session with the MQTT broker is up.", "component"
        )
        up.labels(component).set_function(connected)
        self.broker_losses = self.counter("ftd_broker_disconnects", "Lost sessions with the MQTT broker.")
        self.broker_round_trip = self.histogram(
            "ftd_broker_round_trip_seconds",
            "Time from publishing a message to the broker's acknowledgement.",
            ROUND_TRIP_S,
        )
        errors = "Internal exceptions since the daemon's start; each one is a bug."
        self.registry.register(
            ScrapeCollector(
                lambda: [CounterMetricFamily("ftd_internal_errors", errors, value=internal_errors())]
            )
        )
        self._events = self.counter("ftd_events", "Events by name.", "event")
        self._names: set[str] = set()
        self._ignored = self.counter(
            "ftd_messages_ignored", "Stale messages, from an older generation, incarnation or lineage."
        )
        self._rejected = self.counter(
            "ftd_messages_rejected", "Malformed, oversized or misaddressed messages."
        )
        ProcessCollector(registry=self.registry)

    def count_own_event(self, event: EmitEvent) -> None:
        """Count an event of this daemon, even if the rate limit suppressed it."""
        self.count_event(event.name)
        if event.name == "MessageIgnored":
            self._ignored.inc()
        elif event.name == "MessageRejected":
            self._rejected.inc()

    def count_event(self, name: str, times: int = 1) -> None:
        """Count an event of any sender ``times`` times. Names beyond ``MAX_EVENT_NAMES`` count as ``other``."""
        if name not in self._names:
            if len(self._names) >= MAX_EVENT_NAMES or not _NAME.fullmatch(name):
                name = "other"
            self._names.add(name)
        self._events.labels(name).inc(times)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a new gauge of this registry."""
        return Gauge(name, text, labels, registry=self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a new counter of this registry."""
        return Counter(name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """Return a new histogram of this registry."""
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class ScrapeCollector(Collector):
    """Metrics whose values are read at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        yield from self._read()
