"""One cluster shared by all tests that leave it usable, and the losses that every run must have."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftd.transport.mqtt.mosquitto import find_mosquitto
from ftd.transport.wire.public import JobData
from tests.helpers.playground import FROZEN, RELATIVE, Playground, Run, tiny_job, training_data
from tests.helpers.reference import load, reference_losses
from tests.helpers.shared_cluster import FAILED, SharedCluster

REFERENCE_STEPS = 200
USUAL_DEVICES = 2
NEVER_S = 86400.0
SHARED = pytest.StashKey[SharedCluster]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and put those that share a cluster together."""
    places = [place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ordered = sorted((items[place] for place in places), key=devices_of, reverse=True)
    for place, item in zip(places, ordered, strict=True):
        item.add_marker(pytest.mark.e2e)
        items[place] = item


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call":
        item.stash[FAILED] = call.excinfo is not None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the shared cluster before other tests than those of this directory run: idle daemons would slow them."""
    cluster = item.config.stash.get(SHARED, None)
    if cluster is not None and (nextitem is None or Path(__file__).parent not in nextitem.path.parents):
        cluster.close()


def devices_of(item: pytest.Item) -> int:
    """Return how many devices each node has in the cluster that this test shares."""
    marker = item.get_closest_marker("devices")
    return int(marker.args[0]) if marker else USUAL_DEVICES


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Iterator[SharedCluster]:
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with contextlib.closing(SharedCluster()) as cluster:
        pytestconfig.stash[SHARED] = cluster
        yield cluster


@pytest.fixture
def ground(shared: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Playground]:
    """Lend the usual cluster of four nodes.

    Its nodes are not set aside for repeated failures, since those that tests cause add up. They do not become
    stragglers, because a busy machine slows one of them or another down.
    """
    timing = {"scrub_s": 0.5, "straggler_s": NEVER_S}
    devices = devices_of(request.node)
    with shared.lent(request.node, devices_per_node=devices, quarantine=False, timing=timing) as ground:
        yield ground


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Return a function that computes the losses of the tiny job's first steps in one process, without
    pipelines and failures.
    """
    return _losses_of(tiny_job(tmp_path_factory.mktemp("reference"), delay_s=0.0), REFERENCE_STEPS)


@pytest.fixture(scope="session")
def tied_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Return the same with the weights of the first and the last layer tied."""
    directory = tmp_path_factory.mktemp("tied-reference")
    return _losses_of(tiny_job(directory, delay_s=0.0, arguments="tied = true"), REFERENCE_STEPS // 4)


@pytest.fixture(scope="session")
def frozen_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Return the same with these weights tied, and all weights frozen."""
    job = tiny_job(tmp_path_factory.mktemp("frozen-reference"), delay_s=0.0, arguments=FROZEN)
    return _losses_of(job, REFERENCE_STEPS // 4)


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
    """Return a check that every step was committed once, with the loss of the undisturbed run.

    A coordinator that was killed after it published a step and before it saved that publishes the same step
    again.
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


@pytest.fixture(scope="session", autouse=True)
def _served(zygote_server: None) -> None:
    """Let the zygotes of all tests come from one process that has imported torch."""
