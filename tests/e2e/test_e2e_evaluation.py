"""Evaluation with real processes: a node is killed in the middle of one, which is repeated and reported once."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.helpers.playground import Playground, Run, tiny_job, training_data
from tests.helpers.reference import load, reference_evaluation, reference_run

SameLosses = Callable[[Run], None]
EVALUATION = "[evaluation]\nevery_steps = 5\n"


def test_a_node_killed_during_an_evaluation(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    hold, met = tmp_path / "hold", tmp_path / "hold-met"
    arguments = f'held_out = 37\nhold = "{hold}"'
    run = ground.submit(
        tiny_job(tmp_path, two_node_replicas=True, arguments=arguments, tables=EVALUATION, delay_s=0.01)
    )
    ground.until_event("Evaluated")
    hold.touch()
    ground.until(met.exists, "the next evaluation begins")
    step = max(run.losses)
    ground.inject(do="kill", node="node-1")
    ground.until_event("NodeLost", "node-1")
    assert step not in evaluations(run), "no node has finished it"
    hold.unlink()
    recovery = ground.until_recovery("node_lost")
    assert recovery["step"] == step and recovery["recomputed_steps"] <= 1
    ground.further(12)
    ended = ground.stop_job()
    found = [event["step"] for event in ended.named("Evaluated")]
    assert found == sorted(set(found)) and step in found
    published = [event["step"] for event in ended.events if event["event"] in ("StepCommitted", "Evaluated")]
    assert published == sorted(published), "each evaluation is published between its step and the next"
    assert set(found) >= set(range(5, max(ended.losses), 5))
    data_of_job = training_data(ended.job)
    data = msgspec.structs.replace(data_of_job, arguments={**data_of_job.arguments, "delay_s": 0.0})
    for number in (5, step):
        training = load(data)
        _, model = reference_run(training, data, number)
        loss, weight = reference_evaluation(model, training, data)
        details = evaluations(ended)[number]
        assert (details["loss"], details["weight"]) == (pytest.approx(loss, rel=1e-9), weight)
    same_losses(ended)


def test_the_last_state_is_evaluated_before_the_job_ends(ground: Playground, tmp_path: Path) -> None:
    ground.offer(tiny_job(tmp_path, steps=7, arguments="held_out = 20", tables=EVALUATION))
    run = ground.finish()
    assert [event["step"] for event in run.named("Evaluated")] == [5, 7]
    names = [event["event"] for event in run.events]
    assert names.index("JobFinished") > len(names) - 1 - names[::-1].index("Evaluated")


def evaluations(run: Run) -> dict[int, dict[str, float]]:
    return {event["step"]: event["details"] for event in run.named("Evaluated")}
