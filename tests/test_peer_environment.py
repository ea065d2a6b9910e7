"""The environment of another system for ``benchmarks.recovery --peer``: what is wrong with it is printed."""

import sys
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.peers.torchft import find_problem

pytestmark = pytest.mark.processes


def environment(directory: Path, script: str) -> Path:
    (directory / "bin").mkdir()
    python = directory / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return directory


def test_an_environment_that_lacks_a_package_is_rejected_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = environment(tmp_path, "echo \"ModuleNotFoundError: No module named 'msgspec'\" >&2; exit 1")
    assert "No module named 'msgspec'" in find_problem(lacking)
    monkeypatch.setattr(sys, "argv", ["recovery", "--peer", str(lacking)])
    with pytest.raises(SystemExit) as ended:
        recovery.parse()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "No module named 'msgspec'" in error and "make peer-venv" in error


def test_an_environment_that_runs_the_workers_is_accepted(tmp_path: Path) -> None:
    assert find_problem(environment(tmp_path, "exit 0")) == ""


def test_a_directory_that_is_no_environment_is_rejected(tmp_path: Path) -> None:
    assert "no virtual environment" in find_problem(tmp_path)
