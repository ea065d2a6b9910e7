"""Tests of commands that a signal or an error ends before they are done: what they leave, and their exit code."""

import asyncio
import os
import signal

import pytest
import typer

from ftd.cli.options import run_async, run_until_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_a_command_began(number: signal.Signals) -> None:
    ended = []

    async def wait() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(typer.Exit) as exited:
        run_async(wait())
    assert exited.value.exit_code == 128 + number
    assert ended == [True]


def test_nohup_lets_a_command_outlast_its_terminal() -> None:
    async def hang_up() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_async(hang_up()) == "done"
        assert run_until_signal(hang_up(), print) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)
