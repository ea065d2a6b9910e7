"""Evaluation on the pipelines: the numbers of a plain loop in every layout, and no effect on training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.data.reading import MicrobatchKey
from runtime.device import CPU
from runtime.engine.engine import Engine
from runtime.errors import TrainingError
from runtime.groups.communicator import CommunicationAborted
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet, report_of
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_evaluation, reference_run
from tests.helpers.runtime_support import EXAMPLES, data_for, script

GPT = """
    import dataclasses
    import sys
    from torch.utils.data import Subset
    sys.path.insert(0, {examples!r})
    import gpt

    def held_out(length=37):
        training = gpt.build(blocks=2, width=8, heads=2, length=8, megabytes=1, dropout=0.1)
        last = len(training.dataset)
        return dataclasses.replace(
            training, evaluation=Subset(training.dataset, range(last - length, last)), metrics=metrics
        )

    def metrics(output, batch):
        return {{"right": (output.argmax(-1) == batch[1]).double().mean()}}
"""
THREE_AND_ONE = (
    pipeline((0, 1, [0]), (1, 3, [1]), (3, 4, [2]), first_microbatch=0, microbatches=3),
    pipeline((0, 4, [3]), first_microbatch=3, microbatches=1),
)
SPLIT_ROWS = (pipeline((0, 2, [0, 1, 2]), (2, 4, [3, 4]), first_microbatch=0, microbatches=4),)
SHARDED_ROWS = (
    pipeline((0, 2, [0, 1, 2]), (2, 4, [3, 4]), first_microbatch=0, microbatches=4, sharded=True),
)
ALONE = (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),)
TWO_AND_TWO = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 1, [2]), (1, 4, [3]), first_microbatch=2, microbatches=2),
)
TWO_AND_ONE = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=1, microbatches=3),
    pipeline((0, 4, [2]), first_microbatch=0, microbatches=1),
)


def gpt_job(directory: Path, **changes: Any) -> p.TrainingData:
    """Return a job of five steps; the state after 2, 4 and 5 is evaluated on 37 samples: two global batches
    and a bit.
    """
    script(directory, GPT.format(examples=str(EXAMPLES)))
    fields: dict[str, Any] = {"steps": 5, "evaluation_every_steps": 2, "clip_gradient_norm": 1.0}
    return data_for("mine.py:held_out", directory, **(fields | changes))


def ranks_of(pipelines: tuple[p.WorldPipeline, ...]) -> int:
    return sum(len(stage.ranks) for one in pipelines for stage in one.stages)


@pytest.mark.parametrize("pipelines", [THREE_AND_ONE, TWO_AND_TWO, SPLIT_ROWS, SHARDED_ROWS, ALONE])
@pytest.mark.parametrize("batches", [0, 2])
def test_evaluations_do_not_depend_on_the_layout_and_do_not_change_training(
    tmp_path: Path, pipelines: tuple[p.WorldPipeline, ...], batches: int
) -> None:
    within = pipelines[0].stages[0].within
    job = gpt_job(tmp_path, evaluation_batches=batches, within_node=within)
    plain = gpt_job(tmp_path, evaluation_every_steps=0, within_node=within)
    expected = {}
    for step in (2, 4, 5):
        training = load(job)
        _, model = reference_run(training, job, step)
        expected[step] = reference_evaluation(model, training, job)
    with Fleet(job, ranks_of(pipelines)) as fleet, Fleet(plain, ranks_of(pipelines)) as without:
        fleet.enter(fleet.engines, pipelines)
        fleet.steps(5)
        assert fleet.engines[0].evaluation_due
        fleet.evaluate()
        without.enter(without.engines, pipelines)
        without.steps(5)
        assert fleet.losses == without.losses  # They are equal to the last bit.
        digests = fleet.each(lambda _, engine: engine.compute_digests())
        assert digests == without.each(lambda _, engine: engine.compute_digests())
    assert list(fleet.evaluations) == [2, 4, 5]
    for step, (loss, weight) in expected.items():
        found = fleet.evaluations[step]
        assert found.loss == pytest.approx(loss, rel=1e-9)
        assert found.weight == weight == (32 if batches else 37)
        assert 0 < found.metrics["right"] < 0.5
        assert found.took_s > 0


# --- failures ---------------------------------------------------------------------------------------


def die(fleet: Fleet, victim: Engine, in_batch: int) -> None:
    """Make the victim end at a held-out batch; the others wait for it until they are stopped."""
    evaluator = victim._evaluator
    assert evaluator is not None
    real = evaluator.run

    def run(step: int, batch: int) -> Any:
        if batch < in_batch:
            return real(step, batch)
        fleet.abort()
        raise CommunicationAborted

    evaluator.run = run  # type: ignore[method-assign]


def broken_evaluation(fleet: Fleet) -> None:
    def run(rank: int, engine: Engine) -> bool:
        try:
            engine.evaluate(lambda: False)
        except CommunicationAborted:
            return True
        return False

    assert all(fleet.each(run))


@pytest.mark.parametrize("in_batch", [0, 2])
def test_an_evaluation_that_a_failure_ends_is_repeated_by_the_survivors(
    tmp_path: Path, in_batch: int
) -> None:
    """This uses ZeRO-1 and a different layout afterwards. The committed state and the losses are as without
    the failure.
    """
    job = gpt_job(tmp_path, zero1=True)
    training = load(job)
    losses, model = reference_run(training, job, 5)
    expected = {5: reference_evaluation(model, training, job)}
    training = load(job)
    _, model = reference_run(training, job, 2)
    expected[2] = reference_evaluation(model, training, job)
    with Fleet(job, 4) as fleet:
        fleet.enter(fleet.engines, TWO_AND_TWO)
        fleet.steps(2)
        survivors, victim = fleet.engines[:3], fleet.engines[3]
        before = [engine.compute_digests() for engine in survivors]
        die(fleet, victim, in_batch)
        broken_evaluation(fleet)
        assert [engine.compute_digests() for engine in survivors] == before
        assert [(r.committed_step, r.ready_step, r.evaluation) for r in map(report_of, survivors)] == 3 * [
            (2, None, None)
        ]
        assert fleet.enter(survivors, TWO_AND_ONE) == 2
        assert all(engine.evaluation_due for engine in survivors)
        fleet.steps(3)
        fleet.evaluate()
        assert [fleet.losses[step] for step in range(1, 6)] == pytest.approx(losses, rel=1e-9)
    assert sorted(fleet.evaluations) == [2, 4, 5]
    for step, (loss, weight) in expected.items():
        assert fleet.evaluations[step].loss == pytest.approx(loss, rel=1e-9)
        assert fleet.evaluations[step].weight == weight


def test_a_wish_to_stop_is_honoured_after_the_current_batch(tmp_path: Path) -> None:
    with Fleet(gpt_job(tmp_path), 4) as fleet:
        fleet.enter(fleet.engines, TWO_AND_TWO)
        fleet.steps(2)
        calls: list[int] = []

        def second() -> bool:
            calls.append(1)
            return len(calls) > 4  # Each of four ranks calls this once for each batch.

        assert fleet.evaluate(second) and len(calls) == 8
        assert fleet.evaluations == {} and all(engine.evaluation_due for engine in fleet.engines)
        assert not fleet.evaluate()
        assert fleet.evaluations[2] == report_of(fleet.engines[0]).evaluation
        assert not any(engine.evaluation_due for engine in fleet.engines)


def test_a_wish_to_stop_in_the_last_batch_leaves_the_result(tmp_path: Path) -> None:
    with Fleet(gpt_job(tmp_path, evaluation_batches=1), 1) as fleet:
        fleet.enter(fleet.engines, ALONE)
        fleet.steps(2)
        assert fleet.evaluate(lambda: True)
        assert report_of(fleet.engines[0]).evaluation is not None


def test_a_vote_carries_the_evaluation_before_it_and_a_known_state_is_not_evaluated(tmp_path: Path) -> None:
    with Fleet(gpt_job(tmp_path), 1) as fleet:
        fleet.enter(fleet.engines, ALONE)
        fleet.steps(2)
        fleet.evaluate()
        (third,) = fleet.steps(1)
        assert third.vote.evaluation == fleet.evaluations[2]
        assert fleet.steps(1)[0].vote.evaluation is None
        fleet.evaluated = 4
        fleet.enter(fleet.engines, ALONE)
        assert not fleet.engines[0].evaluation_due
        assert fleet.steps(1)[0].vote.evaluation is None


# --- no effect on training --------------------------------------------------------------------------


def test_buffers_and_generators_are_as_before(tmp_path: Path) -> None:
    text = """
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.norm = nn.BatchNorm1d(3)
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            self.calls += 1
            return self.linear(self.norm(x) + torch.rand_like(x))

    def build():
        return Training(
            layers=[Noisy()], loss=functional.mse_loss, optimizer=sgd, dataset=Rows(), evaluation=Rows()
        )
    """
    script(tmp_path, text)
    job = data_for("mine.py:build", tmp_path, evaluation_every_steps=1)
    whole = (pipeline((0, 1, [0]), first_microbatch=0, microbatches=4),)
    with Fleet(job, 1) as fleet:
        fleet.enter(fleet.engines, whole)
        engine = fleet.engines[0]
        engine.step(lambda: False)
        before = {t.name: t.value.clone() for t in engine.model.tensors_of(0)}
        state = torch.get_rng_state()
        fleet.evaluate()
        first = fleet.evaluations[1]
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(t.value, before[t.name]) for t in engine.model.tensors_of(0))
        engine._evaluated = 0
        fleet.evaluate()
        assert fleet.evaluations[1].loss == first.loss  # Its random numbers follow from the batch.


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_held_out_batches_ahead(tmp_path: Path, workers: int) -> None:
    job = gpt_job(tmp_path, data_workers=workers)
    with Fleet(job, 2) as fleet:
        two = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
        fleet.enter(fleet.engines, two)
        keys = fleet.engines[1]._keys(fleet.engines[1]._assignment_of(_resume(two)))
        found = [next(keys) for _ in range(20)]
        fleet.steps(5)
        fleet.evaluate()
        for engine in fleet.engines:
            engine._loader.close()
    steps = [MicrobatchKey(step, 0, number) for step in (1, 2) for number in range(4)]
    held_out = [MicrobatchKey(2, batch, number) for batch in (1, 2) for number in range(4)] + [
        MicrobatchKey(2, 3, number) for number in range(2)
    ]
    assert found == [*steps, *held_out, MicrobatchKey(3, 0, 0), MicrobatchKey(3, 0, 1)]
    assert sorted(fleet.evaluations) == [2, 4, 5]


def _resume(pipelines: tuple[p.WorldPipeline, ...]) -> p.ResumeRank:
    world = p.WorldData(pipelines=pipelines, transfers=(), hosts=("127.0.0.1",) * 2)
    return p.ResumeRank(
        generation=1, step=0, vote=None, rank=1, world=world, rendezvous_host="", rendezvous_port=0, token=""
    )


# --- bad input --------------------------------------------------------------------------------------

BAD = """
    class Held(Rows):
        def __init__(self, length=8, width=3, bad=None):
            self.length, self.width, self.bad = length, width, bad
        def __len__(self): return self.length
        def __getitem__(self, index):
            if index == self.bad:
                raise OSError("shard 7 is corrupt")
            return torch.full((self.width,), index / 40), torch.tensor([0.0])

    def build(**held):
        evaluation = None if held.get("length") == 0 else Held(**held) if held else [1, 2]
        return Training(
            layers=[nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows(), evaluation=evaluation
        )

    def unequal():
        from pathlib import Path
        made = Path(__file__).parent / "made"
        length = 9 if made.exists() else 8
        made.touch()
        return Training(
            layers=[nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows(),
            evaluation=Held(length=length),
        )
"""


@pytest.mark.parametrize(
    ("arguments", "fields", "says"),
    [
        ({"length": 0}, {}, "every 2 steps, but Training.evaluation is missing"),
        ({}, {}, r"Training.evaluation\[0\] must be a pair"),
        ({"width": 4}, {}, r"Training.evaluation have other shapes .*\(4, 4\)"),
        ({"length": 8}, {"evaluation_every_steps": -1}, "evaluation_every_steps must be at least 0, not -1"),
        ({"length": 8}, {"evaluation_batches": -1}, "evaluation_batches must be at least 0, not -1"),
    ],
)
def test_a_held_out_set_that_cannot_be_used_is_rejected_at_once(
    tmp_path: Path, arguments: dict[str, Any], fields: dict[str, int], says: str
) -> None:
    script(tmp_path, BAD)
    job = data_for("mine.py:build", tmp_path, **({"evaluation_every_steps": 2} | fields), arguments=arguments)
    with torch.random.fork_rng(devices=[]), pytest.raises(TrainingError, match=says):
        Engine(job, CPU, ProgressMonitor())


def test_a_held_out_sample_that_raises_is_named(tmp_path: Path) -> None:
    script(tmp_path, BAD)
    job = data_for("mine.py:build", tmp_path, evaluation_every_steps=1, arguments={"length": 20, "bad": 17})
    with Fleet(job, 1) as fleet:
        fleet.enter(fleet.engines, (pipeline((0, 1, [0]), first_microbatch=0, microbatches=4),))
        fleet.engines[0].step(lambda: False)
        says = r"Training.evaluation raised for index 17 \(row 1 of held-out batch 1\): OSError: shard 7 is corrupt"
        with pytest.raises(TrainingError, match=says):
            fleet.evaluate()


def test_held_out_sets_of_unequal_lengths_are_noticed(tmp_path: Path) -> None:
    script(tmp_path, BAD)
    job = data_for("mine.py:unequal", tmp_path, evaluation_every_steps=1)
    with Fleet(job, 2) as fleet:
        whole = [pipeline((0, 1, [rank]), first_microbatch=2 * rank, microbatches=2) for rank in range(2)]
        fleet.enter(fleet.engines, tuple(whole))
        fleet.steps(1)
        with pytest.raises(TrainingError, match="a different number elsewhere"):
            fleet.evaluate()
