"""Whether a silent trainer could have spoken: how long its threads waited for a processor of this host.

Beats that stay away are the sign of a trainer that was stopped or hangs, and are the same on a host that has
more to do than it can. The kernel knows them apart: it counts, for each thread, the time in which it was
ready and others ran (``schedstat``; where it is not counted, nobody is excused). A thread that keeps the
interpreter's lock and is not let run keeps the beats back as well, so of all threads the longest wait counts.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from statemachine.agent.events import TrainerStarved

PERIOD_S = 0.05
QUIET_S = 0.15
"""Behind a beat: they come three times as often. Until then nothing is read."""


def waited_s(pid: int) -> dict[int, float]:
    """How long each thread of a process has been ready to run and did not, so far."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


class StarvationMonitor:
    """Looks at trainers that are silent, and says for how much longer each could not run."""

    def __init__(
        self,
        pids: Callable[[int], Iterable[int]],
        feed: Callable[[TrainerStarved], None],
        stamp: Callable[[], dict[str, Any]],
    ) -> None:
        """``pids``: of a device's trainer. ``stamp``: what every event begins with."""
        self._pids, self._feed, self._stamp = pids, feed, stamp
        self._heard_at: dict[int, float] = {}
        self._known: dict[int, dict[int, float]] = {}

    def heard(self, device: int, at: float) -> None:
        """A beat."""
        self._heard_at[device] = at
        self._known.pop(device, None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            now = time.monotonic()
            for device, at in self._heard_at.items():
                if now - at >= QUIET_S:
                    self._look(device)

    def _look(self, device: int) -> None:
        waited = {thread: s for pid in self._pids(device) for thread, s in waited_s(pid).items()}
        before, self._known[device] = self._known.get(device), waited
        if before is not None:
            longest_s = max((s - before.get(thread, s) for thread, s in waited.items()), default=0.0)
            if longest_s > 0:
                self._feed(TrainerStarved(**self._stamp(), device=device, for_s=longest_s))
