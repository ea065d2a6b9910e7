"""Tests of commands that a signal or an error ends before they are done: what they leave, and their exit code."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import typer

from ftd.cli.options import run_async, run_until_signal
from ftd.errors import PeerError
from ftd.faults.chaos.player import ScenarioResult
from ftd.faults.chaos.record import ScenarioRecord
from tests.helpers.commands import ftd_here


@pytest.mark.usefixtures("hangups_end_processes")
@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize(("how", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("error", 1)])
def test_scenarios_that_were_played_before_the_end_of_chaos_run_are_in_its_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    local: bool,
    how: str,
    code: int,
) -> None:
    paths = [tmp_path / f"{name}.toml" for name in ("first", "second", "third")]
    for path in paths:
        path.write_text("fault = []\n")
    begun: list[str] = []

    async def play(scenario: Any) -> ScenarioResult:
        begun.append(scenario.name)
        if len(begun) == 3:
            if how == "error":
                raise PeerError("the broker has ended")
            os.kill(os.getpid(), getattr(signal, how))
            await asyncio.sleep(60)
        return ScenarioResult(
            scenario=scenario, verdicts=(), record=ScenarioRecord(), took_s=1.0, ended_by="test"
        )

    async def play_locally(scenarios: Any, _logs: Any, _report: Any, on_result: Any) -> None:
        for scenario in (scenarios[1], scenarios[0], scenarios[2]):  # As if the second had another cluster.
            on_result(await play(scenario))

    async def play_remotely(_address: Any, scenario: Any, *, report: Any) -> ScenarioResult:
        return await play(scenario)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # In the background it may be ignored.
    monkeypatch.setattr("ftd.cli.chaos_run.play_locally", play_locally)
    monkeypatch.setattr("ftd.faults.chaos.remote.play_remotely", play_remotely)
    where = ["--local"] if local else ["--broker", "mqtt://127.0.0.1:9"]
    files = ["--json", str(tmp_path / "a.json"), "--junit", str(tmp_path / "a.xml")]
    try:
        ended, _, err = ftd_here(
            "chaos", "run", *map(str, paths), *where, *files, patch=monkeypatch, said=capsys
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == code
    assert [one["scenario"] for one in json.loads((tmp_path / "a.json").read_text())] == ["first", "second"]
    assert (tmp_path / "a.xml").read_text().count("<testsuite ") == 2
    assert "ftd: 2 of 3 scenarios were played" in err


@pytest.mark.usefixtures("hangups_end_processes")
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
