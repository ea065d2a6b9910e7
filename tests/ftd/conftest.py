"""Real brokers on loopback, and a cluster's configuration around one."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftd.transport.mqtt.mosquitto import find_mosquitto
from tests.helpers.brokers import RunningBroker
from tests.helpers.secure_broker import SecureBroker

PROCESSES = {"start_broker", "secure"}
"""Fixtures that start processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and PROCESSES & set(item.fixturenames):
            item.add_marker(pytest.mark.processes)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a temporary directory whose path is so short that a unix socket can lie below it."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[[str], RunningBroker]]:
    running: list[RunningBroker] = []

    def start(kind: str) -> RunningBroker:
        if kind == "mosquitto" and find_mosquitto() is None:
            pytest.skip("mosquitto is not installed")
        directory = tmp_path / kind
        directory.mkdir()
        running.append(RunningBroker(kind, directory))
        return running[-1]

    yield start
    for broker in running:
        broker.kill()


@pytest.fixture(params=["mosquitto", "embedded"])
def broker(request: pytest.FixtureRequest, start_broker: Callable[[str], RunningBroker]) -> RunningBroker:
    return start_broker(request.param)


@pytest.fixture
def mosquitto(start_broker: Callable[[str], RunningBroker]) -> RunningBroker:
    return start_broker("mosquitto")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    made = SecureBroker(tmp_path_factory.mktemp("secure"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(secure: SecureBroker) -> int:
    return secure.start("localhost")
