"""One shared cluster for all tests that leave it usable, and the losses that every run must have."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftd.mqtt.mosquitto import find_mosquitto
from ftd.wire.public import JobData
from tests.e2e.playground import Playground, Run, playground, tiny_job, training_data
from tests.runtime.reference import load, reference_losses

RELATIVE = 1e-9
REFERENCE_STEPS = 200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def shared() -> Iterator[Playground]:
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with playground(timing={"scrub_s": 0.5}) as ground:
        yield ground


@pytest.fixture
def ground(shared: Playground) -> Iterator[Playground]:
    """The shared cluster, in order: four idle nodes. What it said is held against the contract."""
    shared.tidy()
    yield shared
    shared.contract_is_kept()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Losses of the tiny job's first so many steps in one process: no pipelines, no failures."""
    return _losses_of(tiny_job(tmp_path_factory.mktemp("reference"), delay_s=0.0), REFERENCE_STEPS)


@pytest.fixture(scope="session")
def tied_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """The same with the first and the last layer's weights tied."""
    directory = tmp_path_factory.mktemp("tied-reference")
    return _losses_of(tiny_job(directory, delay_s=0.0, arguments="tied = true"), REFERENCE_STEPS // 4)


def _losses_of(job: JobData, at_once: int) -> Callable[[int], list[float]]:
    data = training_data(job)
    known: list[float] = []

    def losses(steps: int) -> list[float]:
        if len(known) < steps:
            wanted = max(steps, at_once)
            fresh = msgspec.structs.replace(data, steps=wanted)
            known[:] = reference_losses(load(fresh), fresh, wanted)
        return known[:steps]

    return losses


@pytest.fixture
def same_losses(reference: Callable[[int], list[float]]) -> Callable[[Run], None]:
    """Every step was committed once, with the loss of the undisturbed run.

    A coordinator that was killed between telling and remembering tells a step again: the same one.
    """

    def check(run: Run) -> None:
        steps = sorted(run.losses)
        assert steps == list(range(1, len(steps) + 1))
        for event in run.named("StepCommitted"):
            assert event["details"]["loss"] == run.losses[event["step"]]
        expected = reference(len(steps))
        assert [run.losses[step] for step in steps] == pytest.approx(expected, rel=RELATIVE)
        assert all(recovery["rolled_back_steps"] == 0 for recovery in run.recoveries)
        assert all(recovery["recomputed_steps"] <= 1 for recovery in run.recoveries)

    return check
