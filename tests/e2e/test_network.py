"""Tests of a cluster on hosts with a network between them, set up by hand as docs/tutorials/two-hosts.md says;
the tests cut that network.

Each node is on its own host (a network namespace); broker and coordinator are on another. A cut cable is
not a closed socket: nobody is notified, and the processes on the other side live on.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftd.config.job import load_job_data
from ftd.local.child_processes import private_directory
from ftd.local.namespaces import NamespaceNetwork, unavailable_reason
from ftd.processes import module_command
from ftd.transport.mqtt.mosquitto import find_mosquitto
from statemachine.messages.trainer import TrainingData
from tests.helpers.hosts import Programs, programs
from tests.helpers.reference import load, reference_losses
from tests.helpers.waiting import PATIENCE_S

HUB = "hub"
NODES = ("node-a", "node-b", "node-c", "node-d")
POLL_S = 0.05
RELATIVE = 1e-9
STEPS = 200
MICROBATCHES = 50
"""Microbatches that count as evidence that training continues: those of some steps, on any machine."""
CUT_S = 2.5
"""Duration of a cut: longer than the coordinator waits for a silent node, shorter than the broker does."""
Json = dict[str, Any]

# The two files of docs/tutorials/two-hosts.md. With the user line, mosquitto stays root: a change of user
# would clear the signal that ends it with this process.
BROKER = """
listener 1883 0.0.0.0
allow_anonymous false
password_file {password_file}
user root
"""
DAEMON = """
cluster = "lab"
secret_file = "secret"

[broker]
url = "mqtt://{hub}:1883"
username = "ftd"
password = "{password}"

[node]
name = "{name}"
host = "{address}"
rendezvous_port = 7700
runtime_dir = "run/{name}"
snapshot_dir = "memory"

[coordinator]
state_dir = "journal"
"""
JOB = """
name = "net"
steps = {steps}
[training]
function = "{here}/witnessed.py:build"
global_batch = 16
microbatch = 2
seed = 5
precision = "float64"
clip_gradient_norm = 0.5
[training.arguments]
witness = "{witness}"
brake = "{brake}"
brake_s = 0.05
[planner]
device_memory_mib = 0.4  # Two nodes for one copy of the model: activations cross the network, too.
"""


class Deployment:
    """A cluster on several hosts, and the events that it publishes."""

    def __init__(self, directory: Path, network: NamespaceNetwork, running: Programs) -> None:
        self._directory = directory
        self._network = network
        self._programs = running
        self._password = secrets.token_hex()
        self._stream: Path | None = None
        self._lines_read = 0
        self.events: list[Json] = []
        """Events of the present job."""
        self.pids: dict[str, int] = {}
        """Process id of each node's present trainer."""
        self.witness = directory / "witness"
        self.brake = directory / "brake"

    # --- setting up --------------------------------------------------------------------------------

    def open(self) -> None:
        """Start broker, coordinator and an observer on the hub, and each node on its host."""
        secret = self._directory / "secret"
        secret.write_text(secrets.token_hex())
        secret.chmod(0o600)
        self._start_broker()
        for name in (HUB, *NODES):
            self._write_config(name)
        self._programs.start("coordinator", HUB, self._ftd("coordinator", "--config", self._config(HUB)))
        self.until(lambda: self.ask("status", "--json", must=False), "an answer from the coordinator")
        watch = self._ftd("events", "--follow", "--json", "--last", "1000", "--config", self._config(HUB))
        self._stream = self._programs.start("observer", HUB, watch)
        for node in NODES:
            self._programs.start(node, node, self._ftd("node", "--config", self._config(node)))

    def _start_broker(self) -> None:
        passwords = self._directory / "passwords"
        subprocess.run(
            ["mosquitto_passwd", "-b", "-c", str(passwords), "ftd", self._password],
            check=True,
            timeout=PATIENCE_S,
        )
        config = self._directory / "mosquitto.conf"
        config.write_text(BROKER.format(password_file=passwords))
        self._programs.start("mosquitto", HUB, [str(find_mosquitto()), "-c", str(config)])

    def _write_config(self, name: str) -> None:
        text = DAEMON.format(
            hub=self._network.address(HUB),
            password=self._password,
            name=name,
            address=self._network.address(name),
        )
        path = Path(self._config(name))
        path.write_text(text)
        path.chmod(0o600)

    def _config(self, name: str) -> str:
        return str(self._directory / f"{name}.toml")

    @staticmethod
    def _ftd(*arguments: str) -> list[str]:
        return module_command("ftd.cli.main", *arguments)

    # --- the command line ----------------------------------------------------------------------------

    def ask(self, *arguments: str, must: bool = True) -> str:
        """Return what ``ftd …`` prints on the hub; the text is empty if the command fails and ``must`` is
        false.
        """
        command = self._network.command(HUB, *self._ftd(*arguments, "--config", self._config(HUB)))
        done = subprocess.run(command, check=False, capture_output=True, timeout=PATIENCE_S, text=True)
        assert done.returncode == 0 or not must, f"{arguments}: {done.stderr}\n{self.describe()}"
        return done.stdout if done.returncode == 0 else ""

    def state(self) -> Json:
        found: Json = json.loads(self.ask("status", "--json"))
        return found

    def journal(self) -> list[Json]:
        """Return the output of ``ftd events``, which a late reader sees."""
        return [json.loads(line) for line in self.ask("events", "--json", "--last", "1000").splitlines()]

    def submit(self) -> TrainingData:
        """Submit a job that is slow while the brake file exists; return when it trains."""
        self._read()
        self.events.clear()
        self.brake.touch()
        path = self._directory / "job.toml"
        here = Path(__file__).parents[1] / "helpers"
        path.write_text(JOB.format(steps=STEPS, here=here, witness=self.witness, brake=self.brake))
        self.ask("submit", str(path))
        self.until_step(5)
        return msgspec.convert(load_job_data(path).training, TrainingData)

    def finish(self) -> None:
        """Let the job run at full speed to its end."""
        self.brake.unlink()
        self.until(lambda: self.named("JobFinished") or self.named("JobFailed"), "the job's end")
        assert self.named("JobFinished"), self.describe()

    # --- the network -----------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        self._network.cut(host)

    def heal(self, host: str) -> None:
        self._network.heal(host)

    # --- observing -------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the events that the observer wrote since; leave an incomplete last line for the next call."""
        if self._stream is not None:
            lines = self._stream.read_bytes().split(b"\n")[:-1]
            new = [json.loads(line) for line in lines[self._lines_read :]]
            self._lines_read = len(lines)
            self.events += new
            self.pids |= {e["node"]: e["details"]["pid"] for e in new if e["event"] == "TrainerStarted"}

    def named(self, name: str, node: str | None = None) -> list[Json]:
        return [e for e in self.events if e["event"] == name and node in (None, e["node"])]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(e["step"], e["details"]["loss"]) for e in self.named("StepCommitted")]

    @property
    def step(self) -> int:
        return max((step for step, _ in self.losses), default=0)

    @property
    def recoveries(self) -> list[Json]:
        return [e["details"]["recovery"] for e in self.named("RecoveryCompleted")]

    def until(self, holds: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._read()
            if holds():
                return
            assert not self._programs.ended(), f"{self._programs.ended()} ended\n{self.describe()}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}\n{self.describe()}"
            time.sleep(POLL_S)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step, f"step {step}")

    def further(self, steps: int) -> None:
        self._read()
        self.until_step(self.step + steps)

    def until_recovery(self, cause: str) -> Json:
        self.until(lambda: any(r["cause"] == cause for r in self.recoveries), f"recovery from {cause}")
        return next(r for r in self.recoveries if r["cause"] == cause)

    @property
    def trained(self) -> int:
        """Return how many microbatches the trainers computed, whether or not they could report it."""
        return self.witness.stat().st_size

    def until_ready(self) -> None:
        """Wait until all nodes are there, each with an idle trainer."""

        def ready() -> bool:
            nodes = self.state()["nodes"]
            healthy = {name for name, node in nodes.items() if node["state"] == "HEALTHY"}
            return healthy == set(NODES) == set(self.pids)

        self.until(ready, "all nodes healthy")

    def describe(self) -> str:
        published = [e for e in self.events if e["event"] != "StepCommitted"]
        lines = [
            f"{e['monotonic']:.2f} {e['event']} {e['node'] or ''} g{e['generation']} {e['reason'][:200]}"
            for e in published
        ]
        return "\n".join([f"step {self.step}", *lines[-60:], self._programs.tails()])


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    if find_mosquitto() is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto is not installed")
    if reason := unavailable_reason():
        pytest.skip(reason)
    with private_directory() as directory, programs((HUB, *NODES), directory) as (network, running):
        found = Deployment(directory, network, running)
        found.open()
        yield found


def check_losses(deployment: Deployment, data: TrainingData) -> None:
    """Check that each step was committed once, in order, with the loss of an undisturbed single process."""
    alone = msgspec.structs.replace(data, arguments={})
    expected = reference_losses(load(alone), alone, STEPS)
    steps = [step for step, _ in deployment.losses]
    assert steps == list(range(1, STEPS + 1))
    assert [loss for _, loss in deployment.losses] == pytest.approx(expected, rel=RELATIVE)
    assert not deployment.named("ReplicasDiverged")
    assert all(recovery["rolled_back_steps"] == 0 for recovery in deployment.recoveries)
    assert all(recovery["recomputed_steps"] <= 1 for recovery in deployment.recoveries)
    # The journal shows late readers the same events that the observer received.
    published = [e for e in deployment.events if e["event"] != "StepCommitted"]
    journal = deployment.journal()
    assert all(event in journal for event in published)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_node_is_cut_off_and_comes_back(deployment: Deployment) -> None:
    deployment.until_ready()
    data = deployment.submit()
    pipelines = deployment.named("PlanChosen")[0]["details"]["pipelines"]
    assert [len(pipeline["stages"]) for pipeline in pipelines] == [2, 2]
    # Of all nodes, cut the one that runs the rendezvous: the next generation must meet elsewhere.
    lost = pipelines[0]["stages"][0]["devices"][0].split("/")[0]
    incarnation = deployment.state()["nodes"][lost]["incarnation"]
    before = dict(deployment.pids)

    deployment.cut(lost)
    deployment.until_recovery("node_lost")
    [event] = deployment.named("NodeLost")
    assert (event["node"], event["details"]["how"]) == (lost, "silence")
    assert alive(before[lost]), "a cut cable ends nobody: the stale trainer must be there to be kept out"
    deployment.further(10)
    assert deployment.state()["nodes"][lost]["state"] == "OFFLINE"

    deployment.heal(lost)
    back = deployment.until_recovery("node_joined")
    assert back["nodes"] == [lost]
    assert back["recomputed_steps"] == 0
    [fenced] = deployment.named("NodeFenced")
    assert (fenced["node"], fenced["details"]["incarnation"]) == (lost, incarnation)
    [joined] = deployment.named("NodeJoined")
    assert joined["node"] == lost
    assert joined["details"]["incarnation"] > incarnation
    assert deployment.named("GenerationStarted")[-1]["details"]["mode"] == "boundary"
    assert not alive(before[lost])
    assert {n: p for n, p in deployment.pids.items() if n != lost} == {
        n: p for n, p in before.items() if n != lost
    }
    deployment.further(5)
    deployment.finish()
    check_losses(deployment, data)
    assert len(deployment.named("NodeLost")) == 1
    # The steps that members of the old generation committed end where the new generation begins.
    generations = [e["generation"] for e in deployment.named("StepCommitted")]
    assert generations == sorted(generations)


def test_the_hub_is_cut_off_and_comes_back(deployment: Deployment) -> None:
    """No node can reach broker or coordinator: the nodes keep training, and every step is known afterwards."""
    deployment.until_ready()
    data = deployment.submit()
    before = dict(deployment.pids)

    deployment.cut(HUB)
    seen, since = deployment.trained, time.monotonic()
    deployment.until(
        lambda: deployment.trained > seen + MICROBATCHES and time.monotonic() > since + CUT_S,
        "training continues without the hub",
    )
    known = deployment.step
    deployment.heal(HUB)
    deployment.until_step(known + 30)
    assert deployment.pids == before
    deployment.finish()
    check_losses(deployment, data)
    assert not deployment.named("NodeLost")
    assert len(deployment.named("GenerationStarted")) == 1, deployment.describe()
    assert len({e["generation"] for e in deployment.named("StepCommitted")}) == 1
