"""A limit on the memory of trainers, checked while tests run."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_PERIOD_S = 0.005


def private_mib(pid: int) -> float:
    """Return the private memory of a process; snapshots and parked layers are shared pages, which do not
    count.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def largest_private_mib(pids: Iterable[int]) -> float:
    """Return the private memory of the process that has most; those that have ended do not count."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            found.append(private_mib(pid))
    return max(found)


class MemoryGuard:
    """A guard that samples the memory of processes until the end of the ``with`` block.

    :param pids: returns the processes that are running.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-guard", daemon=True)
        self.peaks_mib: dict[int, float] = {}
        """Peaks by process."""

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            for pid in list(self._pids()):
                try:
                    mib = private_mib(pid)
                except (OSError, ValueError):
                    continue  # The process has ended.
                self.peaks_mib[pid] = max(mib, self.peaks_mib.get(pid, 0.0))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
