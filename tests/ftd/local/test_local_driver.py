"""Tests of a local cluster that cannot start, cannot leave what it was asked for, or is stopped while it starts."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from ftd.cli import command, main
from ftd.errors import ConfigurationError, PeerError, UnreachableError
from ftd.local.cluster import ClusterOptions, _repeat
from ftd.local.driver import LocalDriver


def start(logs: Path | None = None) -> None:
    async def enter() -> None:
        async with LocalDriver(ClusterOptions(), ["node-0"], logs=logs):
            raise AssertionError("it started")

    asyncio.run(enter())


def test_logs_that_cannot_be_written_are_rejected_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ConfigurationError, match=r"--logs: the directory .*file cannot be created: it is a file"
    ):
        start(file)
    with pytest.raises(
        ConfigurationError, match=r"--logs: the directory .* cannot be created: Not a directory"
    ):
        start(file / "logs")


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/dev/null")
    with pytest.raises(PeerError, match=r"the cluster cannot start: Not a directory: /dev/null.*set TMPDIR"):
        start()


def test_a_wait_for_the_broker_ends_when_it_is_cancelled() -> None:
    def wait(timeout_s: float) -> None:
        assert timeout_s < 1
        raise UnreachableError("nobody listens")

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_repeat(wait, 60.0), 0.01)
        with pytest.raises(UnreachableError, match="nobody listens"):
            await _repeat(wait, 0.0)

    asyncio.run(cancel())


def test_ctrl_c_ends_the_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "main", interrupt)
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 130
