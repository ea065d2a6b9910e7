"""ZeRO-1 when a trainer dies at a chosen moment of a step; and replicas, element by element."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.engine.engine import Engine
from runtime.errors import TrainingError
from runtime.zero import sharding as sharding_module
from runtime.zero.parts import PartsError
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet, report_of
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import data_for, gpt_data, script
from tests.helpers.snapshots import stage as stage_layers
from tests.helpers.step_phases import after_vote, in_compute, in_gather, in_vote

TWO_AND_TWO = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 1, [2]), (1, 4, [3]), first_microbatch=2, microbatches=2),
)
TWO_AND_ONE = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=1, microbatches=3),
    pipeline((0, 4, [2]), first_microbatch=0, microbatches=1),
)
THREE = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 4, [2]), first_microbatch=2, microbatches=1),
    pipeline((0, 3, [3]), (3, 4, [4]), first_microbatch=3, microbatches=1),
)
STEPS = 9


def job() -> p.TrainingData:
    return gpt_data(steps=STEPS, global_batch=16, microbatch_rows=4, clip_gradient_norm=1.0, zero1=True)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_run(load(job()), job(), STEPS)[0]


@pytest.mark.parametrize("phase", [in_compute, in_vote, after_vote, in_gather])
def test_with_replicas_a_death_rolls_nothing_back(
    expected: list[float], phase: Callable[[Fleet, Engine], None]
) -> None:
    """Two pipelines of two ranks are cut differently. One rank dies, three continue; two join; another dies."""
    with Fleet(job(), 4) as fleet:
        assert fleet.enter(fleet.engines, TWO_AND_TWO) == 0
        fleet.steps(2)
        survivors, victim = fleet.engines[:3], fleet.engines[3]
        phase(fleet, victim)
        fleet.broken_step()
        committed = 3 if phase in (after_vote, in_gather) else 2
        if phase is in_gather:
            # A rank that was stopped before its own update makes up for it when all are resumed.
            there = [engine for engine in survivors if engine.committed_step == committed]
            assert [report_of(engine).held for engine in there] == [()] * len(there)
        fleet.engines[0].__dict__.pop("_hold_vote", None)
        assert fleet.enter(survivors, TWO_AND_ONE) == committed
        fleet.steps(2)
        survivors = list(fleet.engines)
        assert fleet.enter([*survivors, *fleet.join(2)], THREE) == committed + 2
        fleet.steps(1)
        phase(fleet, fleet.engines[2])
        fleet.broken_step()
        fleet.engines[0].__dict__.pop("_hold_vote", None)
        left = [engine for number, engine in enumerate(fleet.engines) if number != 2]
        assert fleet.enter(left, TWO_AND_TWO) == committed + 3 + (phase in (after_vote, in_gather))
        fleet.steps(STEPS - fleet.engines[0].committed_step)
        digests = [engine.compute_digests() for engine in fleet.engines]
        assert digests[0] | digests[1] == digests[2] | digests[3]
        assert [fleet.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("phase", [in_compute, in_gather])
def test_without_replicas_the_reports_show_the_missing_part(phase: Callable[[Fleet, Engine], None]) -> None:
    with Fleet(job(), 4, protection="none") as fleet:
        fleet.enter(fleet.engines, TWO_AND_TWO)
        fleet.steps(1)
        phase(fleet, fleet.engines[3])
        fleet.broken_step()
        parts = {(part.layer, part.start) for e in fleet.engines[:3] for part in report_of(e).parts}
        assert parts == {(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)}
        with pytest.raises(PartsError, match=r"no rank has the .* of elements \d+–\d+ of layer 1 "):
            fleet.enter(fleet.engines[:3], TWO_AND_ONE)


def test_a_generation_without_a_commit_changes_nothing(expected: list[float]) -> None:
    """Parts held before are still there when the next plan fails before its first commit, next to the parts
    that it made.
    """
    with Fleet(job(), 4) as fleet:
        fleet.enter(fleet.engines, TWO_AND_TWO)
        fleet.steps(2)
        before = report_of(fleet.engines[0])
        fleet.enter([*fleet.engines, *fleet.join(1)], THREE)
        assert set(report_of(fleet.engines[0]).parts) > set(before.parts)
        in_vote(fleet, fleet.engines[4])
        fleet.broken_step()
        assert fleet.enter(fleet.engines[:4], TWO_AND_TWO) == 2
        fleet.steps(1)
        assert report_of(fleet.engines[0]).parts == before.parts
        fleet.enter([*fleet.engines, *fleet.join(1)], THREE)
        in_gather(fleet, fleet.engines[4])
        fleet.broken_step()
        assert fleet.enter(fleet.engines[:4], TWO_AND_TWO) == 4
        fleet.steps(1)
        assert [fleet.losses[step] for step in range(1, 6)] == pytest.approx(expected[:5], rel=1e-9)


def test_whole_layers_in_files_are_divided_among_owners(tmp_path: Path, expected: list[float]) -> None:
    """Snapshots and checkpoints contain whole layers, here written by a job without ZeRO-1."""
    plain = msgspec.structs.replace(job(), zero1=False)
    alone = (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),)
    with Fleet(plain, 1, protection="none") as fleet:
        fleet.enter(fleet.engines, alone)
        fleet.steps(3)
        stage_layers(fleet.packed(), tmp_path)
    with Fleet(job(), 4) as fleet:
        fleet.restore, fleet.restore_step = str(tmp_path), 3
        assert fleet.enter(fleet.engines, TWO_AND_TWO) == 3
        fleet.restore = ""
        fleet.steps(1)
        in_gather(fleet, fleet.engines[3])
        fleet.broken_step()
        assert fleet.enter(fleet.engines[:3], TWO_AND_ONE) == 5
        fleet.steps(2)
        losses = [fleet.losses[step] for step in range(4, 8)]
        assert losses == pytest.approx(expected[3:7], rel=1e-9)


# --- replicas ------------------------------------------------------------------------------------

OPTIMIZERS = """
def factory(name):
    def make(named):
        ps = [{"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}]
        ps += [{"params": [p for n, p in named if "bias" not in n]}]
        return {
            "sgd": lambda: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
            "adam": lambda: torch.optim.Adam(ps, lr=0.01, weight_decay=0.02, amsgrad=True),
            "adamw": lambda: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
            "adagrad": lambda: torch.optim.Adagrad(ps, lr=0.01, initial_accumulator_value=0.1),
            "adafactor": lambda: torch.optim.Adafactor(ps),
        }[name]()
    return make

def build(name):
    tail = nn.Sequential(nn.Tanh(), nn.Linear(5, 1))
    layers = [nn.Linear(3, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 5)), tail]
    return Training(layers=layers, loss=functional.mse_loss, optimizer=factory(name), dataset=Rows(),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.1, total_steps=20, cycle_momentum=name in ("sgd", "adamw")))
"""
PAIR = (
    pipeline((0, 2, [0]), (2, 3, [1]), first_microbatch=0, microbatches=1),
    pipeline((0, 1, [2]), (1, 3, [3]), first_microbatch=1, microbatches=1),
)


def small(directory: Path, name: str, **changes: object) -> p.TrainingData:
    script(directory, OPTIMIZERS)
    fields = {
        "global_batch": 8,
        "microbatch_rows": 4,
        "clip_gradient_norm": 0.05,
        "zero1": True,
        "precision": "float32",
        "arguments": {"name": name},
    }
    return data_for("mine.py:build", directory, **(fields | changes))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_replicas_equal_their_owners_bit_for_bit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has weight decay by group, a schedule, clipping, and a step that is skipped."""
    monkeypatch.setattr(sharding_module, "CHECK_STEPS", 3)
    data = small(tmp_path, name)
    expected, _ = reference_run(load(data), data, 4)
    with Fleet(data, 4) as fleet:
        fleet.enter(fleet.engines, PAIR)
        for _ in range(4):
            assert all(result.diverged == () for result in fleet.steps(1))
        assert [fleet.losses[step] for step in range(1, 5)] == pytest.approx(expected, rel=1e-5)
        assert_replicas_agree(fleet)
        before = [engine.compute_digests() for engine in fleet.engines]
        overflow(fleet)
        assert all(result.vote.skipped and not result.diverged for result in fleet.steps(1))
        assert [engine.compute_digests() for engine in fleet.engines] == before
        fleet.engines[0]._gradients.__dict__.pop("squared_norm")
        assert not any(result.vote.skipped for result in fleet.steps(2))
        assert_replicas_agree(fleet)


def overflow(fleet: Fleet) -> None:
    """Make the next step's gradients not finite on one rank, so that all ranks skip it."""
    gradients = fleet.engines[0]._gradients
    assert gradients is not None
    norm = gradients.squared_norm
    gradients.squared_norm = lambda: (norm()[0], 1)  # type: ignore[method-assign]


def assert_replicas_agree(fleet: Fleet) -> None:
    own, replicas = {}, {}
    for engine in fleet.engines:
        assert engine.sharding is not None
        engine.sharding.held_parts()
        for part in engine.sharding.states.held:
            target = replicas if part.replica else own
            target[part.layer, part.start] = engine.sharding.states.digest(part)
            assert all(one.state for one in part.slices)
    assert own == replicas and len(own) == 6


def test_a_replica_that_differs_is_reported_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding_module, "CHECK_STEPS", 2)
    with Fleet(small(tmp_path, "adamw"), 4) as fleet:
        fleet.enter(fleet.engines, PAIR)
        fleet.steps(1)
        sharding = fleet.engines[3].sharding
        assert sharding is not None and sharding.replica is not None
        sharding.replica.finish()
        moment = sharding.replica.parts[1].slices[0].state["exp_avg"]
        assert isinstance(moment, torch.Tensor)
        moment[0] += 1.0
        results = fleet.steps(1)
        assert [[one.layer for one in result.diverged] for result in results] == [[], [], [], [2]]
        assert "the part from 0/2 to 1/2 differed" in results[3].diverged[0].detail
        assert_replicas_agree(fleet)
        assert all(result.diverged == () for result in fleet.steps(2))
        # A thread that has ended updates no replica; the next check starts another.
        sharding.replica._apply = lambda options: 1 / 0  # type: ignore[method-assign,assignment]
        fleet.steps(1)
        assert not any(part.replica for part in sharding.held_parts())
        assert [one.layer for one in fleet.steps(1)[3].diverged] == [1, 2]
        assert_replicas_agree(fleet)


def test_one_rank_of_a_split_stage_keeps_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding_module, "CHECK_STEPS", 1)
    split = (
        pipeline((0, 3, [0, 1]), first_microbatch=0, microbatches=1),
        pipeline((0, 1, [2]), (1, 3, [3]), first_microbatch=1, microbatches=1),
    )
    with Fleet(small(tmp_path, "adam"), 4) as fleet:
        fleet.enter(fleet.engines, split)
        for _ in range(2):
            assert all(result.diverged == () for result in fleet.steps(1))
        reported = [{(part.start, part.replica) for part in report_of(e).parts} for e in fleet.engines]
        assert reported == [{(0, False), (1, True)}, {(0, False)}, *[{(1, False), (0, True)}] * 2]
        assert_replicas_agree(fleet)


def test_an_optimizer_that_combines_elements_is_rejected(tmp_path: Path) -> None:
    data = small(tmp_path, "adafactor")
    with (
        torch.random.fork_rng(devices=[]),
        pytest.raises(TrainingError, match=r"Adafactor is not known.*AdamW"),
    ):
        Fleet(data, 1)
