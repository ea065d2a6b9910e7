"""A job's logs when leading coordinators hang and die: all processes are real."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftd.config.job import load_job_data
from ftd.transport.wire.public import JobData
from tests.helpers.playground import Playground, write_job
from tests.helpers.shared_cluster import SharedCluster
from tests.helpers.tracking_logs import plotted_run, record_of, steps_of
from tests.helpers.wandb_files import offline_history

EVERY = 10
LOGGING = f"""
[evaluation]
every_steps = {EVERY}
[logging]
tensorboard = "runs"
wandb = {{mode = "offline"}}
mlflow = {{}}
"""


@pytest.fixture
def pair(shared: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Playground]:
    """Lend a cluster with two coordinators."""
    with shared.lent(request.node, nodes=2, coordinators=2, timing={"leader_silence_s": 2.0}) as ground:
        yield ground


def logged_job(directory: Path) -> JobData:
    path = write_job(directory, arguments="held_out = 32")
    path.write_text(path.read_text() + LOGGING)
    return load_job_data(path)


def run_of(ground: Playground, directory: Path) -> Path:
    return directory / "runs" / str(ground.state["job"]["id"])


def every_step_once(ground: Playground, run: Path) -> None:
    """Check that every step is logged once in each destination, with the loss that was published."""
    ground.fill_gaps()
    assert ground.run is not None
    by_step = ground.run.losses
    everything = list(range(1, max(by_step) + 1))
    assert sorted(by_step) == everything
    ground.until(lambda: [s for s, _ in record_of(run)] == everything, "the record has all", limit_s=30)
    assert dict(record_of(run)) == by_step

    def complete() -> bool:
        return steps_of(plotted_run(run).get("train/loss", [])) == everything

    ground.until(complete, "the event files have all", limit_s=30)
    shown = plotted_run(run)
    for tag in ("train/learning_rate", "train/gradient_norm", "train/metrics/largest_error"):
        assert steps_of(shown[tag]) == everything, tag
    evaluated = everything[EVERY - 1 : -1 : EVERY]  # The job is stopped, so the last step is not evaluated.
    assert steps_of(shown["evaluation/loss"])[: len(evaluated)] == evaluated
    assert steps_of(shown["evaluation/metrics/largest_error"])[: len(evaluated)] == evaluated
    # The time of a step is unknown if a node reported the step again from memory.
    timed = steps_of(shown["train/step_s"])
    assert timed == sorted(set(timed))
    [loss] = run.parent.glob("mlruns/*/*/metrics/train/loss")
    assert [int(line.split()[2]) for line in loss.read_text().splitlines()] == everything
    # A writer that died between a step and its evaluation leaves two records of the step, with one half each.
    history = offline_history(run, run.name)
    assert [step for step, values in history if "train/loss" in values] == everything
    in_history = [step for step, values in history if "evaluation/loss" in values]
    assert in_history[: len(evaluated)] == evaluated and in_history == sorted(set(in_history))


def finished(ground: Playground, run: Path) -> None:
    """Stop the job once the writer has caught up, and wait until it has ended."""
    assert ground.run is not None
    newest = max(ground.run.losses)
    ground.until(lambda: record_of(run)[-1][0] > newest, "the steps of all leaders are logged")
    ground.stop_job()
    place = run / "writer.lock"
    ground.until(lambda: not is_locked(place), "the writer is gone", limit_s=40)


def is_locked(path: Path) -> bool:
    inode = str(path.stat().st_ino)
    return any(line.split()[5].endswith(f":{inode}") for line in Path("/proc/locks").read_text().splitlines())


def test_the_logs_have_every_step_once_when_leaders_hang_and_die(pair: Playground, tmp_path: Path) -> None:
    """A leader hangs, is deposed and wakes up; the next leader is killed together with its child processes."""
    pair.until_standby()
    pair.submit(logged_job(tmp_path))
    run = run_of(pair, tmp_path)
    pair.until(lambda: len(record_of(run)) > 10, "steps are logged")
    first = pair.state["leader"]
    os.kill(pair.cluster.pid(first), signal.SIGSTOP)
    second = pair.until_event("LeaderElected")["details"]["leader"]
    pair.further()
    os.kill(pair.cluster.pid(first), signal.SIGCONT)
    pair.until_standby()
    pair.further()
    pair.on_loop(pair.cluster.kill(second))
    assert pair.until_event("LeaderElected", times=2)["details"]["leader"] == first
    pair.further()
    finished(pair, run)
    every_step_once(pair, run)
