"""Every sample is used exactly once in an epoch, whatever fails: committed steps name their samples."""

from pathlib import Path

import pytest

from ftd import sample_indices
from ftd.config.job import load_job_data
from tests.helpers.playground import Playground, training_data, write_job
from tests.helpers.reference import load, reference_losses

SAMPLES, BATCH = 480, 16


def test_a_spike_is_undone_and_its_batch_left_out_also_after_a_kill(
    ground: Playground, tmp_path: Path
) -> None:
    """The losses are those of a run that never had the batch."""
    spiked, after = 14, 24
    path = write_job(tmp_path, arguments=f'samples = {SAMPLES}\nlog = "{tmp_path / "read"}"\ncorrupt = []')
    text = path.read_text().replace("tiny.py:build", "sampled.py:build")
    seed = training_data(load_job_data(path)).seed
    batch = sample_indices(SAMPLES, BATCH, seed, spiked)
    text = text.replace("corrupt = []", f"corrupt = {batch}")
    text = text.replace("seed =", 'on_spike = "skip"\nspike_window = 8\nseed =')
    path.write_text(text + "\n[snapshot]\nevery_steps = 4\n")
    job = load_job_data(path)
    ground.submit(job)
    event = ground.until_event("LossSpiked")
    assert (event["details"]["batch"], event["details"]["skipped"]) == (spiked, True)
    ground.inject(do="kill", node="node-1")
    ground.until_recovery("node_lost")
    ground.until_step(after)
    run = ground.stop_job()
    used = {event["step"]: event["details"]["metrics"]["number"] for event in run.named("StepCommitted")}
    for step in range(1, after + 1):
        due = sample_indices(SAMPLES, BATCH, seed, step, (spiked,) if step >= spiked else ())
        assert used[step] == pytest.approx(sum(due) / BATCH, rel=1e-12), step
    data = training_data(job)
    undisturbed = reference_losses(load(data), data, after, (spiked,))
    assert [run.losses[step] for step in range(1, after + 1)] == pytest.approx(undisturbed, rel=1e-9)


def test_committed_steps_use_the_samples_that_are_due(ground: Playground, tmp_path: Path) -> None:
    """This holds across a kill, a return and the end of an epoch."""
    log = tmp_path / "read"
    path = write_job(tmp_path, arguments=f'samples = {SAMPLES}\nlog = "{log}"')
    path.write_text(path.read_text().replace("tiny.py:build", "sampled.py:build"))
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
