"""``Training.on_step`` is called on one rank for every committed step, whatever fails in between."""

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.errors import TrainingError
from runtime.training import load_training
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet
from tests.helpers.harness import Cluster, pipeline
from tests.helpers.runtime_support import data_for, script
from tests.helpers.snapshots import stage as stage_layers

HOOKED = """
    from dataclasses import asdict
    import json

    def build(*, log, bad_step=0):
        def on_step(info):
            with open(log, "a") as file:
                file.write(json.dumps(asdict(info)) + "\\n")
            if info.step == bad_step:
                raise OSError("the disk is full")

        layers = [nn.Linear(3, 4), nn.Linear(4, 1)]
        return Training(layers=layers, loss=functional.mse_loss, optimizer=sgd, dataset=Rows(), on_step=on_step)
"""
BOTH = (
    pipeline((0, 2, [0]), first_microbatch=0, microbatches=2),
    pipeline((0, 2, [1]), first_microbatch=2, microbatches=2),
)
ALONE = (pipeline((0, 2, [0]), first_microbatch=0, microbatches=4),)


def hooked_job(directory: Path, **arguments: Any) -> p.TrainingData:
    script(directory, HOOKED)
    return data_for("mine.py:build", directory, arguments={"log": str(directory / "log"), **arguments})


def calls(directory: Path) -> list[dict[str, Any]]:
    log = directory / "log"
    return [msgspec.json.decode(line) for line in log.read_bytes().splitlines()] if log.exists() else []


def called_steps(directory: Path) -> list[int]:
    return [call["step"] for call in calls(directory)]


def test_one_rank_calls_it_with_the_results_of_the_vote(tmp_path: Path) -> None:
    with Fleet(hooked_job(tmp_path), 2) as fleet:
        fleet.enter(fleet.engines, BOTH)
        fleet.steps(3)
    assert called_steps(tmp_path) == [1, 2, 3]
    for call in calls(tmp_path):
        vote = fleet.votes[call["step"]]
        reported = (
            call["loss"],
            call["weight"],
            call["gradient_norm"],
            call["learning_rate"],
            call["metrics"],
        )
        assert reported == (vote.loss, vote.weight, vote.gradient_norm, vote.learning_rate, vote.metrics)
        assert call["samples_per_s"] == pytest.approx(16 / call["step_s"]) and call["tokens_per_s"] is None


@pytest.mark.parametrize("first_dies", [True, False], ids=["the one that calls it dies", "another one dies"])
def test_a_lost_rank_causes_no_missing_call_and_no_repeated_call_of_a_survivor(
    tmp_path: Path, first_dies: bool
) -> None:
    with Fleet(hooked_job(tmp_path), 2) as fleet:
        fleet.enter(fleet.engines, BOTH)
        fleet.steps(2)
        survivor = fleet.engines[1 if first_dies else 0]
        fleet.enter([survivor], ALONE)
        fleet.steps(1)
        # No survivor can know that the dead rank had called it for step 2.
        assert called_steps(tmp_path) == ([1, 2, 2, 3] if first_dies else [1, 2, 3])
        if first_dies:
            assert calls(tmp_path)[2]["step_s"] is None


def test_a_step_that_was_committed_and_not_called_yet_is_called_by_the_next_group(tmp_path: Path) -> None:
    with Fleet(hooked_job(tmp_path), 2) as fleet:
        fleet.enter(fleet.engines, BOTH)
        fleet.steps(1)
        fleet.each(lambda rank, engine: engine.step(lambda: False))  # Rank 0 dies before it calls the hook.
        [newcomer] = fleet.join(1)
        fleet.enter([newcomer, fleet.engines[1]], BOTH)
        assert called_steps(tmp_path) == [1, 2]
        fleet.steps(1)
        assert called_steps(tmp_path) == [1, 2, 3]
        fleet.enter([fleet.engines[1], newcomer], BOTH)
        fleet.steps(1)
        assert called_steps(tmp_path) == [1, 2, 3, 4], "the one that had called it is rank 1 now, and says so"


def test_the_last_step_of_a_job_is_not_missed(tmp_path: Path) -> None:
    job = msgspec.structs.replace(hooked_job(tmp_path), steps=2)
    with Fleet(job, 2) as fleet:
        fleet.enter(fleet.engines, BOTH)
        fleet.steps(1)
        fleet.each(lambda rank, engine: engine.step(lambda: False))
        fleet.enter(fleet.engines[1:], ALONE)
        assert called_steps(tmp_path) == [1, 2]


def test_after_a_rollback_it_is_called_for_the_steps_that_run_again(tmp_path: Path) -> None:
    job = hooked_job(tmp_path)
    with Fleet(job, 1, protection="none") as fleet:
        fleet.enter(fleet.engines, ALONE)
        fleet.steps(3)
        stage_layers(fleet.packed(), tmp_path)
        fleet.steps(2)
        fleet.join(1)
        fleet.restore, fleet.restore_step = str(tmp_path), 3
        assert fleet.enter(fleet.engines, BOTH) == 3
        fleet.restore = ""
        fleet.enter(fleet.engines[1:], ALONE)
        fleet.steps(2)
    assert called_steps(tmp_path) == [1, 2, 3, 4, 5, 4, 5]


def test_a_killed_process_causes_no_missing_call(tmp_path: Path) -> None:
    with Cluster() as cluster:
        first, second = cluster.fork(2)
        job = msgspec.structs.replace(hooked_job(tmp_path), steps=1_000_000)
        cluster.prepare([first, second], job)
        cluster.quiesce([first, second])
        cluster.resume([first, second], BOTH, step=0)
        second.take(p.TrainerStepped, step=30)
        first.kill(signal.SIGKILL)
        [report] = cluster.quiesce([second])
        step = report.committed_step
        cluster.resume([second], ALONE, step=step, vote=report.vote)
        second.take(p.TrainerStepped, step=step + 10)
        second.kill(signal.SIGKILL)
    steps = called_steps(tmp_path)
    assert set(range(1, step + 10)) <= set(steps)
    repeated = [number for number in set(steps) if steps.count(number) > 1]
    assert set(repeated) <= {step, step + 1}
    assert sum(a > b for a, b in pairwise(steps)) <= 1, "in order, except for those that are called again"


def test_a_hook_that_raises_is_an_error_of_the_user_that_names_it(tmp_path: Path) -> None:
    with Fleet(hooked_job(tmp_path, bad_step=2), 1) as fleet:
        fleet.enter(fleet.engines, ALONE)
        says = (
            r"Training.on_step raised OSError: the disk is full \(mine.py, line \d+, in on_step\) for step 2"
        )
        with pytest.raises(TrainingError, match=says):
            fleet.steps(3)
        assert fleet.engines[0].committed_step == 2


def test_a_hook_that_is_not_a_function_is_rejected(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        def build():
            return Training(
                layers=[nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows(), on_step=5
            )
        """,
    )
    with pytest.raises(TrainingError, match=r"Training\.on_step must be a function, not a int"):
        load_training(data_for("mine.py:build", tmp_path))
