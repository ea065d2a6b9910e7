"""Tests of sd_notify with a socket of our own in place of systemd's."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from ftd import systemd


def test_notify_without_a_service_manager_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent/socket")
    systemd.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "relative")
    systemd.notify("READY=1")


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_receives_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    name = f"ftd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        systemd.notify("READY=1", "STATUS=well")
        assert manager.recv(1000) == b"READY=1\nSTATUS=well"


def test_watchdog_messages_are_sent_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        assert systemd.watchdog_period_s() == 0.01

        async def scene() -> None:
            task = asyncio.create_task(systemd.feed_watchdog())
            for _ in range(3):
                assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
            task.cancel()

        asyncio.run(scene())


@pytest.mark.parametrize(
    ("limit", "pid"), [("", None), ("0", None), ("soon", None), ("1000000", "another's")]
)
def test_without_a_watchdog_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch, limit: str, pid: str | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", limit)
    if pid is None:
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
    else:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    assert systemd.watchdog_period_s() is None
    asyncio.run(systemd.feed_watchdog())
