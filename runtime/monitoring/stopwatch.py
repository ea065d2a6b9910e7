"""How long this device computes on a microbatch, without any waiting for others.

Measured where the layers run, so that neither a pipeline bubble nor the reading of samples counts: what is
left compares with the profile of the same layers, and a device that has become slow shows, whatever the
others do. A host may only order the work, so events on the device's stream are what is read.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.device import DeviceRuntime, Event
from runtime.monitoring.progress import ProgressMonitor


class Stopwatch:
    """One per generation and rank; ``begin_step`` at each step."""

    def __init__(self, runtime: DeviceRuntime, monitor: ProgressMonitor) -> None:
        self._runtime = runtime
        self._monitor = monitor
        self._events: list[tuple[int, Event, Event]] = []

    def begin_step(self) -> None:
        self._events.clear()

    @contextmanager
    def time_microbatch(self, microbatch: int) -> Iterator[None]:
        """The forward or the backward pass of a microbatch; no waiting for peers inside."""
        began, ended = self._runtime.event(), self._runtime.event()
        began.record()
        with self._slowed():
            yield
        ended.record()
        self._events.append((microbatch, began, ended))

    @contextmanager
    def _slowed(self) -> Iterator[None]:
        """Chaos: take ``pace.slowness`` times as long, by sleeping; or raise."""
        self._monitor.raise_injected_error()
        slowness = self._monitor.slowness
        if slowness <= 1.0:
            yield
            return
        started = self._now()
        yield
        time.sleep((slowness - 1.0) * (self._now() - started))

    def _now(self) -> float:
        self._runtime.synchronize()
        return time.perf_counter()

    def microbatch_ms(self) -> float:
        """Median over the step's microbatches of forward and backward together; 0 where there were none.

        To be asked when the device has done the step: after its VOTE.
        """
        spent_ms: defaultdict[int, float] = defaultdict(float)
        for microbatch, began, ended in self._events:
            spent_ms[microbatch] += ended.ms_since(began)
        return statistics.median(spent_ms.values()) if spent_ms else 0.0
