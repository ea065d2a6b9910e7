"""Every sample is used exactly once in an epoch, whatever fails: committed steps name their samples."""

from pathlib import Path

import pytest

from ftd import sample_indices
from ftd.config.job import load_job_data
from tests.helpers.playground import Playground, training_data, write_job

SAMPLES, BATCH = 480, 16


def test_committed_steps_use_the_samples_that_are_due(ground: Playground, tmp_path: Path) -> None:
    """This holds across a kill, a return and the end of an epoch."""
    log = tmp_path / "read"
    path = write_job(tmp_path, arguments=f'samples = {SAMPLES}\nlog = "{log}"')
    text = path.read_text().replace("tiny.py:build", "sampled.py:build")
    path.write_text(text.replace("delay_s = 0.002\n", ""))
    job = load_job_data(path)
    ground.submit(job)
    ground.until_step(6)
    ground.inject(do="kill", node="node-1")
    ground.until_recovery("node_lost")
    ground.inject(do="start", node="node-1")
    ground.until_recovery("node_joined")
    ground.until_step(SAMPLES // BATCH + 3)
    run = ground.stop_job()
    read = {int(line) for line in log.read_text().split()}
    assert read == set(range(SAMPLES))
    used: list[int] = []
    for event in run.named("StepCommitted"):
        step, found = event["step"], event["details"]["metrics"]
        due = sample_indices(SAMPLES, BATCH, training_data(job).seed, step)
        assert found["number"] == pytest.approx(sum(due) / BATCH, rel=1e-12)
        assert found["square"] == pytest.approx(sum(n * n for n in due) / BATCH, rel=1e-12)
        if step <= SAMPLES // BATCH:
            used += due
    assert sorted(used) == list(range(SAMPLES))
