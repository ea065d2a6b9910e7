"""A short ``ftd chaos soak``: random faults on a real cluster violate no invariant."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.local_commands import FTD, ftd, leftovers
from tests.helpers.playground import write_job


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    """Yield an environment of its own under a short path, in which leftovers are found."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield {**os.environ, "XDG_RUNTIME_DIR": name, "TMPDIR": name, "OMP_NUM_THREADS": "1"}


def test_a_soak_holds_and_leaves_nothing(tmp_path: Path, home: dict[str, str]) -> None:
    job = write_job(tmp_path, steps=200, devices=1, two_node_replicas=True)
    with job.open("a") as file:
        file.write('[snapshot]\nevery_steps = 20\nprotection = "aec+buddy"\n')
    report, plot, logs = tmp_path / "soak.json", tmp_path / "soak.svg", tmp_path / "logs"
    options = ["--minutes", 0.3, "--seed", 5, "--rate", 40, "--nodes", 4, "--limit", 120, "--logs", logs]
    command = [*FTD, "chaos", "soak", job, *options, "--report", report, "--plot", plot]
    done = subprocess.run(
        [str(part) for part in command], env=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["passed"]
    assert found["violations"] == []
    # The number of faults depends on the machine; a rule checks that training continued afterwards.
    assert sum(found["by_kind"].values()) >= 1, done.stdout
    assert found["goodput"]["step_s"] > 0
    assert "every rule held" in done.stdout
    assert plot.stat().st_size > 1000
    assert (logs / "coordinator.log").exists()
    assert leftovers(home) == []


def test_a_soak_reports_a_job_that_does_not_run(tmp_path: Path, home: dict[str, str]) -> None:
    """The file is wrong, so nothing is started."""
    done = ftd("chaos", "soak", tmp_path / "nowhere.toml", home=home)
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr
    done = ftd("chaos", "soak", tmp_path / "nowhere.toml", "--plot", tmp_path / "soak.gif", home=home)
    assert (done.returncode, "--plot" in done.stderr) == (2, True)
