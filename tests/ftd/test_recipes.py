"""docs/how-to/recipes.md, command by command as it is written there, against a real broker."""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path

import paho.mqtt.publish
import pytest

from ftd.transport.wire.contract_examples import DETAILS, EXAMPLES, envelope
from ftd.transport.wire.duplicates import REMEMBERED
from tests.helpers.brokers import RunningBroker
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
CLUSTER = "ftd-2"
COMMANDS = re.findall(
    r"^```sh\n(.*?)^```", (ROOT / "docs" / "how-to" / "recipes.md").read_text(), re.MULTILINE | re.DOTALL
)


def recipe(word: str) -> str:
    [found] = [command for command in COMMANDS if word in command]
    return str(found)


class Running:
    """A running recipe with the lines of its standard output."""

    def __init__(self, command: str, environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()


@pytest.fixture
def environment(mosquitto: RunningBroker, tmp_path: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cluster = {"FTD_BROKER": mosquitto.address.url, "FTD_CLUSTER": CLUSTER}
    return {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "PATH": path} | cluster


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[[str], Running]]:
    running: list[Running] = []

    def begin(command: str) -> Running:
        running.append(Running(command, environment))
        return running[-1]

    yield begin
    for one in running:
        one.close()


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed (tools/install-mosquitto installs them by apt)")


def publish(broker: RunningBroker, recipe: Running, events: list[str], enough: int) -> list[str]:
    """Publish events until the recipe has printed ``enough`` lines, as it does not say when it has subscribed."""
    deadline = time.monotonic() + PATIENCE_S
    messages = [
        (
            f"ftd/v2/{CLUSTER}/events",
            json.dumps({**envelope(name, DETAILS.get(name, {})), "id": f"e-{name}"}),
            1,
            False,
        )
        for name in events
    ]
    while len(recipe.lines) < enough and time.monotonic() < deadline:
        paho.mqtt.publish.multiple(messages, "127.0.0.1", broker.port)
        time.sleep(0.1)
    assert len(recipe.lines) >= enough, recipe.lines
    return recipe.lines


def test_the_recipe_for_warnings(mosquitto: RunningBroker, start: Callable[[str], Running]) -> None:
    need("mosquitto_sub", "jq")
    lines = publish(
        mosquitto, start(recipe("severity !=")), ["StepCommitted", "NodeLost", "ClusterPaused"], 2
    )
    assert {line.split()[1] + line.split()[2] for line in lines} == {
        "warningNodeLost",
        "criticalClusterPaused",
    }


def test_the_recipe_for_recoveries(mosquitto: RunningBroker, start: Callable[[str], Running]) -> None:
    need("mosquitto_sub", "jq")
    lines = publish(mosquitto, start(recipe("total_ms")), ["NodeLost", "RecoveryCompleted"], 1)
    assert json.loads(lines[0]) == {
        "cause": "node_lost", "nodes": ["node-2"], "total_ms": 253.0, "tier": "live_replica",
    }  # fmt: skip


def test_the_recipe_for_nodes(mosquitto: RunningBroker, environment: dict[str, str]) -> None:
    need("mosquitto_sub", "jq")
    state = json.dumps(EXAMPLES["ClusterState"])
    paho.mqtt.publish.single(f"ftd/v2/{CLUSTER}/cluster/state", state, 1, True, "127.0.0.1", mosquitto.port)
    done = subprocess.run(
        ["bash", "-c", recipe("map_values")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert json.loads(done.stdout) == {"node-3": "HEALTHY"}


def test_the_subscriber_in_python(mosquitto: RunningBroker, start: Callable[[str], Running]) -> None:
    events = ["StepCommitted", "NodeLost", "RecoveryCompleted"]
    lines = publish(mosquitto, start(recipe("subscriber.py")), events, 2)
    # It may have subscribed between these events, and then prints the second one first.
    assert any("warning  NodeLost  a sentence for people" in line for line in lines)
    assert not any("StepCommitted" in line for line in lines)


def test_the_contract_is_kept_and_compared(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-ec", recipe("--against")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "this version is compatible with kept.json\n"), done.stderr


@pytest.mark.parametrize(
    ("url", "calls"),
    [
        ("mqtt://h", [("connect", "h", 1883)]),
        ("mqtt://h:7", [("connect", "h", 7)]),
        ("mqtts://h", [("tls_set",), ("connect", "h", 8883)]),
        ("mqtts://a%40b:p%2F@h:7", [("username_pw_set", "a@b", "p/"), ("tls_set",), ("connect", "h", 7)]),
    ],
)
def test_the_subscriber_uses_all_parts_of_the_address(
    monkeypatch: pytest.MonkeyPatch, url: str, calls: list[tuple[str | int, ...]]
) -> None:
    client = unittest.mock.Mock()
    monkeypatch.setattr("paho.mqtt.client.Client", lambda *_: client)
    monkeypatch.setenv("FTD_BROKER", url)
    found = runpy.run_path(str(ROOT / "examples" / "subscriber.py"))
    assert found["seen"].maxlen == REMEMBERED  # A new leader publishes up to 2,000 events a second time.
    made = [(name, *positional) for name, positional, _ in client.mock_calls]
    assert made == [*calls, ("loop_forever",)]


def test_the_subscriber_is_short() -> None:
    lines = (ROOT / "examples" / "subscriber.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 24
