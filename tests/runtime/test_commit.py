"""The commit rule on one engine in this process: roll forward, redo, reset, skip."""

import math
from pathlib import Path

import pytest
import torch

from runtime.engine.engine import Engine, EngineError
from runtime.errors import TrainingError
from runtime.groups.communicator import CommunicationAborted, SoloCommunicator
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import ResumeRank, TrainingData, WorldData
from statemachine.messages.values import Vote
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import data_for, gpt_data, script

CPU = torch.device("cpu")


def engine_of(data: TrainingData) -> Engine:
    with torch.random.fork_rng(devices=[]):
        return Engine(data, CPU, ProgressMonitor())


def enter(engine: Engine, step: int, vote: Vote | None = None) -> None:
    """Enter a generation of one rank with all layers."""
    engine.commit_or_discard(step, vote)
    layers = engine.model.layer_count
    microbatches = engine.data.global_batch // engine.data.microbatch_rows
    resume = ResumeRank(
        generation=1,
        step=step,
        vote=vote,
        rank=0,
        world=WorldData(
            pipelines=(pipeline((0, layers, [0]), first_microbatch=0, microbatches=microbatches),),
            transfers=(),
            hosts=("127.0.0.1",),
        ),
        rendezvous_host="",
        rendezvous_port=0,
        token="",
    )
    engine.enter(resume, SoloCommunicator())


def no() -> bool:
    return False


def stop_at_vote(engine: Engine) -> None:
    """Abort when this rank holds complete gradients, but before VOTE."""

    def abort() -> bool:
        raise CommunicationAborted

    with pytest.raises(CommunicationAborted):
        engine.step(abort)


def votes(data: TrainingData, steps: int) -> list[Vote]:
    engine = engine_of(data)
    enter(engine, 0)
    return [engine.step(no).vote for _ in range(steps)]


MASKED = """
    class Masked(Rows):
        def __getitem__(self, index):
            row, target = super().__getitem__(index)
            target = torch.full((4,), index % 3)
            target[: index % 5] = -100  # Rows ignore 0 to 4 of their targets.
            return row, target

    def loss(output, target):
        total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return total, (target != -100).sum()

    def build():
        layers = [nn.Linear(3, 8), nn.Linear(8, 12), nn.Unflatten(1, (4, 3))]
        return Training(layers=layers, loss=loss, optimizer=sgd, dataset=Masked())
"""


@pytest.fixture(params=["mean over rows", "mean over targets"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> TrainingData:
    if request.param == "mean over rows":
        return gpt_data(clip_gradient_norm=0.5)
    script(tmp_path, MASKED)
    return data_for("mine.py:build", tmp_path, clip_gradient_norm=0.05)


def test_ready_gradients_survive_and_are_applied(data: TrainingData) -> None:
    expected, _ = reference_run(load(data), data, 4)
    others = votes(data, 2)
    engine = engine_of(data)
    enter(engine, 0)
    engine.step(no)
    stop_at_vote(engine)
    assert (engine.committed_step, engine.ready_step, engine.vote) == (1, 2, others[0])
    # Its peers passed VOTE of step 2 and committed. It follows with the vote that they report.
    enter(engine, 2, others[1])
    assert (engine.committed_step, engine.ready_step, engine.vote) == (2, None, others[1])
    losses = [engine.step(no).vote.loss for _ in range(2)]
    assert losses == pytest.approx(expected[2:], rel=1e-12)


def test_gradients_in_flight_are_discarded_and_the_step_is_redone(data: TrainingData) -> None:
    expected, _ = reference_run(load(data), data, 3)
    engine = engine_of(data)
    enter(engine, 0)
    first = engine.step(no).vote
    stop_at_vote(engine)
    enter(engine, 1, first)
    assert (engine.committed_step, engine.ready_step) == (1, None)
    losses = [engine.step(no).vote.loss for _ in range(2)]
    assert losses == pytest.approx(expected[1:], rel=1e-12)


ASSIGNED = """
    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + len(x)
            return super().forward(x)

    def build():
        return Training(layers=[Counted()], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
"""


def test_an_assigned_buffer_does_not_count_the_rows_of_a_discarded_step(tmp_path: Path) -> None:
    script(tmp_path, ASSIGNED)
    engine = engine_of(data_for("mine.py:build", tmp_path))

    def count() -> float:
        return next(float(one.value) for one in engine.model.tensors_of(0) if one.kind == "buffer")

    enter(engine, 0)
    first = engine.step(no).vote
    assert count() == 16
    stop_at_vote(engine)
    enter(engine, 1, first)
    assert count() == 16
    engine.step(no)
    assert count() == 32


def test_a_rank_that_was_absent_holds_nothing(data: TrainingData) -> None:
    engine = engine_of(data)
    engine.commit_or_discard(7, Vote(loss=1.0, gradient_norm=1.0))
    assert (
        engine.committed_step == 7
        and engine.complete_layers == set()
        and engine.model.held_layers == frozenset()
    )
    with pytest.raises(EngineError, match="no rank sent them"):
        enter(engine, 7)


def test_applying_without_a_vote_is_rejected(data: TrainingData) -> None:
    engine = engine_of(data)
    enter(engine, 0)
    stop_at_vote(engine)
    with pytest.raises(EngineError, match="its vote is missing"):
        engine.commit_or_discard(1, None)


def test_the_vote_carries_a_stop(data: TrainingData) -> None:
    engine = engine_of(data)
    enter(engine, 0)
    assert engine.step(lambda: True).stop_requested
    assert not engine.step(no).stop_requested
    assert engine.committed_step == 2


def test_gradients_that_are_not_finite_skip_the_update_but_commit(tmp_path: Path) -> None:
    """Sample 0 causes an infinite gradient. Its step commits without an update; all other steps train."""
    script(
        tmp_path,
        """
        class Poison(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))
            def forward(self, x):
                poison = torch.where(x[:, :1] == 0, torch.inf, 1.0)
                return (x * self.weight).sum(1, keepdim=True) * poison.detach()

        def build():
            return Training(layers=[Poison()], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    data = data_for("mine.py:build", tmp_path, global_batch=10, microbatch_rows=5)
    engine = engine_of(data)
    enter(engine, 0)
    skipped = []
    for _ in range(4):
        before = engine.model.named_parameters([0])[0][1].detach().clone()
        vote = engine.step(no).vote
        unchanged = torch.equal(before, engine.model.named_parameters([0])[0][1])
        assert vote.skipped == unchanged
        skipped.append(vote.skipped)
    assert sum(skipped) == 1 and engine.committed_step == 4


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_skips_the_update(tmp_path: Path, weight: float) -> None:
    """Sample 39 has such a weight."""
    script(
        tmp_path,
        f"""
        class Weighted(Rows):
            def __getitem__(self, index):
                row, target = super().__getitem__(index)
                weight = torch.tensor(float("{weight}") if index == 39 else 1.0)
                return row, torch.cat([target.reshape(1), weight.reshape(1)])

        def loss(output, target):
            return (output[:, 0] - target[:, 0]).square().sum(), target[:, 1].sum()

        def build():
            return Training(layers=[nn.Linear(3, 1)], loss=loss, optimizer=sgd, dataset=Weighted())
        """,
    )
    data = data_for("mine.py:build", tmp_path, global_batch=10, microbatch_rows=5)
    engine = engine_of(data)
    enter(engine, 0)
    skipped = []
    for _ in range(4):
        before = engine.model.named_parameters([0])[0][1].detach().clone()
        vote = engine.step(no).vote
        now = engine.model.named_parameters([0])[0][1]
        assert vote.skipped == torch.equal(before, now) and now.isfinite().all()
        skipped.append(vote.skipped)
    assert sum(skipped) == 1 and engine.committed_step == 4


def test_running_statistics_count_a_redone_step_once(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        def build():
            layers = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)]
            return Training(layers=layers, loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    data = data_for("mine.py:build", tmp_path, global_batch=8, microbatch_rows=4)

    def buffers(engine: Engine) -> list[list[float]]:
        return [t.value.tolist() for t in engine.model.tensors_of(0) if t.kind == "buffer"]

    smooth, broken = engine_of(data), engine_of(data)
    for engine in (smooth, broken):
        enter(engine, 0)
        engine.step(no)
    stop_at_vote(broken)
    assert buffers(broken) != buffers(smooth)
    enter(broken, 1, broken.vote)
    assert buffers(broken) == buffers(smooth)
    smooth.step(no)
    broken.step(no)
    assert buffers(broken) == buffers(smooth)


@pytest.mark.parametrize("where", ["step 1", "the evaluation after step 1"])
def test_a_negative_sum_of_weights_is_rejected(tmp_path: Path, where: str) -> None:
    text = """
    def build(*, where):
        def loss(output, target):
            negative = len(target) if where == "step 1" or not torch.is_grad_enabled() else 0
            return (output - target).square().sum(), len(target) - 2 * negative
        return Training(layers=[nn.Linear(3, 1)], loss=loss, optimizer=sgd, dataset=Rows(), evaluation=Rows())
    """
    script(tmp_path, text)
    job = data_for("mine.py:build", tmp_path, arguments={"where": where}, evaluation_every_steps=1)
    engine = engine_of(job)
    enter(engine, 0)
    with pytest.raises(
        TrainingError, match=f"the weights of the loss in {where} have the sum -.* at least 0"
    ):
        engine.step(no)
        engine.evaluate(no)
    assert engine.committed_step == (0 if where == "step 1" else 1)
