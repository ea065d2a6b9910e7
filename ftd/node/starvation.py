"""Detection of starved trainers: how long the threads of a silent trainer waited for a processor.

Missing heartbeats mean that a trainer was stopped or hangs, or that the host has more work than it can do.
The kernel tells these cases apart: for each thread it counts the time in which the thread was ready while
others ran (``schedstat``; where that is not counted, no trainer is excused). A thread that holds the
interpreter lock and does not get a processor delays the heartbeats as well, so the longest wait of all
threads counts.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ftd.driver import Driver
from statemachine.agent.events import TrainerStarved

PERIOD_S = 0.05
QUIET_S = 0.15
"""Time after a heartbeat before anything is read; heartbeats come three times as often."""


def read_scheduling_delays(pid: int) -> dict[int, float]:
    """Return for each thread of a process how long it has been ready to run without running so far."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


class StarvationMonitor:
    """A monitor that reports for each silent trainer how long it could not run since the last report."""

    def __init__(self, pids: Callable[[int], Iterable[int]], driver: Driver) -> None:
        """:param pids: returns the processes of a device's trainer."""
        self._pids, self._driver = pids, driver
        self._heartbeat_at: dict[int, float] = {}
        self._delays: dict[int, dict[int, float]] = {}

    def record_heartbeat(self, device: int, at: float) -> None:
        """Note that a heartbeat of this device's trainer arrived."""
        self._heartbeat_at[device] = at
        self._delays.pop(device, None)

    async def run(self) -> None:
        """Check silent trainers until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            now = time.monotonic()
            for device, at in self._heartbeat_at.items():
                if now - at >= QUIET_S:
                    self._check_trainer(device)

    def _check_trainer(self, device: int) -> None:
        delays = {
            thread: s for pid in self._pids(device) for thread, s in read_scheduling_delays(pid).items()
        }
        before, self._delays[device] = self._delays.get(device), delays
        if before is not None:
            longest_s = max((s - before.get(thread, s) for thread, s in delays.items()), default=0.0)
            if longest_s > 0:
                self._driver.feed(TrainerStarved(**self._driver.stamp(), device=device, for_s=longest_s))
