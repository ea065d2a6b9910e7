"""How long this device computes on a microbatch, without any waiting for others.

Measured where the layers run, so that neither a pipeline bubble nor the reading of samples counts: what is
left compares with the profile of the same layers, and a device that has become slow shows, whatever the
others do. On CUDA the host only orders the work, so events on the device's stream are what is read.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runtime.watch.pace import Pace


class Stopwatch:
    """One per generation and rank; ``begin`` at each step."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device = device
        self._pace = pace
        self._spent_ms: defaultdict[int, float] = defaultdict(float)
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._spent_ms.clear()
        self._events.clear()

    @contextmanager
    def computing(self, microbatch: int) -> Iterator[None]:
        """The forward or the backward pass of a microbatch; no waiting for peers inside."""
        if self._device.type == "cuda":
            begun, ended = _event(), _event()
            begun.record()
            with self._slowed():
                yield
            ended.record()
            self._events.append((microbatch, begun, ended))
        else:
            started = time.perf_counter()
            with self._slowed():
                yield
            self._spent_ms[microbatch] += 1e3 * (time.perf_counter() - started)

    @contextmanager
    def _slowed(self) -> Iterator[None]:
        """Chaos: take ``pace.slowness`` times as long, by sleeping; or raise."""
        self._pace.raise_if_asked()
        slowness = self._pace.slowness
        if slowness <= 1.0:
            yield
            return
        started = self._now()
        yield
        time.sleep((slowness - 1.0) * (self._now() - started))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def microbatch_ms(self) -> float:
        """Median over the step's microbatches of forward and backward together; 0 where there were none.

        To be asked when the device has done the step: after its VOTE.
        """
        for microbatch, begun, ended in self._events:
            self._spent_ms[microbatch] += begun.elapsed_time(ended)
        self._events.clear()
        return statistics.median(self._spent_ms.values()) if self._spent_ms else 0.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
