"""Detection of starved processes by the kernel's counts, with real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ftd.node import starvation
from ftd.node.starvation import StarvationMonitor, read_scheduling_delays
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.processes

SPIN = "print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def spinning(count: int, processor: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that all compete for one processor."""
    command = [sys.executable, "-c", SPIN]
    found = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in found:
            assert process.stdout is not None and process.stdout.readline()
            os.sched_setaffinity(process.pid, {processor})
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def stamp() -> dict[str, Any]:
    return {"at": time.monotonic(), "cause": "c"}


async def reported_delay(pid: int, enough: float, limit_s: float) -> float:
    """Return the reported waiting time of a process without heartbeats, once it is ``enough`` or after
    ``patience_s``.
    """
    reported: list[float] = []
    driver: Any = SimpleNamespace(feed=lambda event: reported.append(event.for_s), stamp=stamp)
    monitor = StarvationMonitor(lambda device: [pid], driver)
    monitor.record_heartbeat(0, time.monotonic())
    task = asyncio.ensure_future(monitor.run())
    deadline = time.monotonic() + limit_s
    while sum(reported) < enough and time.monotonic() < deadline:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return sum(reported)


def test_a_starved_process_is_excused_and_a_stopped_one_is_not() -> None:
    processor = min(os.sched_getaffinity(0))
    with spinning(3, processor) as (first, *_):
        if not any(read_scheduling_delays(first.pid).values()):
            pytest.skip("this kernel does not count it")
        began = time.monotonic()
        reported_s = asyncio.run(reported_delay(first.pid, 0.5, PATIENCE_S))
        assert 0.5 <= reported_s <= time.monotonic() - began
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
        assert asyncio.run(reported_delay(first.pid, 0.1, 1.0)) < 0.1


def test_trainers_with_heartbeats_are_not_read_and_a_missing_process_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    monkeypatch.setattr(
        starvation, "read_scheduling_delays", lambda pid: read.append(pid) or {1: float(len(read))}
    )
    reported: list[tuple[int, float]] = []

    async def scene() -> None:
        driver: Any = SimpleNamespace(feed=lambda e: reported.append((e.device, e.for_s)), stamp=stamp)
        monitor = StarvationMonitor(lambda device: [device], driver)
        monitor.record_heartbeat(7, time.monotonic() + 3600.0)
        monitor.record_heartbeat(8, time.monotonic() - 3600.0)
        task = asyncio.ensure_future(monitor.run())
        while len(reported) < 2:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())
    assert set(read) == {8} and reported[:2] == [(8, 1.0), (8, 1.0)]
    assert read_scheduling_delays(2**22 + 1) == {}
