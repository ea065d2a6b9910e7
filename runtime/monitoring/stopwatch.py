"""Time that this device computes on a microbatch, without waits.

It is measured where the layers run, so neither pipeline bubbles nor the reading of samples count. The
result is comparable with the profile of the same layers and reveals a device that has become slow, whatever
the other devices do. A host may only enqueue the work, so events on the device's stream are measured.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.device import DeviceEvent, DeviceRuntime
from runtime.monitoring.progress import ProgressMonitor


class Stopwatch:
    """The compute times of one rank in one generation; call ``begin_step`` at each step."""

    def __init__(self, runtime: DeviceRuntime, monitor: ProgressMonitor) -> None:
        self._runtime = runtime
        self._monitor = monitor
        self._events: list[tuple[int, DeviceEvent, DeviceEvent]] = []

    def begin_step(self) -> None:
        self._events.clear()

    @contextmanager
    def time_microbatch(self, microbatch: int) -> Iterator[None]:
        """Time the forward or the backward pass of a microbatch; it must not wait for peers inside."""
        began, ended = self._runtime.event(), self._runtime.event()
        began.record()
        with self._slowed():
            yield
        ended.record()
        self._events.append((microbatch, began, ended))

    @contextmanager
    def _slowed(self) -> Iterator[None]:
        """Inject faults: raise, or take ``slowness`` times as long by sleeping."""
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
        """Return the median over the step's microbatches of forward and backward together; 0 if there were
        none.

        Call this when the device has finished the step: after its VOTE.
        """
        spent_ms: defaultdict[int, float] = defaultdict(float)
        for microbatch, began, ended in self._events:
            spent_ms[microbatch] += ended.ms_since(began)
        return statistics.median(spent_ms.values()) if spent_ms else 0.0
