"""The coordinator as a process, and a node that the test controls by hand."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftd.config.job import load_job_data
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.mqtt.session import MqttSession, Will
from ftd.transport.wire.codec import decode_to_node, decode_to_nodes, encode_from_node
from ftd.transport.wire.public import (
    NodeStateMessage,
    StatusRequest,
    encode_json,
    timestamp,
)
from ftd.transport.wire.topics import Topics
from planner.values import LayerProfile, ModelProfile
from statemachine.messages.cluster import (
    Command,
    FromNode,
    Heartbeat,
    Hello,
    Prepare,
    Quiesced,
    RequestHello,
    Resume,
    Signal,
    Stepped,
    ToNode,
)
from statemachine.messages.common import Prepared, Quiesce, Resumed
from statemachine.messages.values import CommittedStep, DeviceReport, NodeFacts, NodeState, Vote
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


LAYERS = 3


PROFILE = ModelProfile(
    layers=(
        LayerProfile(
            forward_ms=1.0,
            backward_ms=2.0,
            parameter_bytes=10,
            gradient_bytes=10,
            optimizer_bytes=20,
            activation_bytes=10,
            output_bytes=10,
        ),
    )
    * LAYERS,
    microbatch_rows=4,
)


class Daemon:
    """``ftd coordinator`` with its own configuration."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.log = directory / "coordinator.log"
        self.config = directory / "ftd.toml"
        self.config.write_text(
            f'cluster = "t"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n[coordinator]\nstate_dir = "state"\n'
            "[timing]\nhello_grace_s = 0.5\nstart_settle_s = 0.1\n"
        )
        self.address = ClusterAddress(broker=BrokerAddress(host="127.0.0.1", port=port), cluster="t")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ftd.cli.main", "coordinator", "--config", str(self.config)],
                stderr=log,
                stdout=log,
                cwd=ROOT,
            )

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self.process = None
        return code

    def said(self) -> str:
        return self.log.read_text()


class PlayedNode:
    """A node without trainers, which sends what the test asks for and collects the commands that it receives."""

    def __init__(self, daemon: Daemon, name: str, incarnation: int = 1) -> None:
        self.name, self.incarnation = name, incarnation
        self.topics = Topics(cluster="t")
        self.job_id: str | None = None
        self.generation = 0
        self.training = False
        self.commands: asyncio.Queue[Command] = asyncio.Queue()
        self.broadcasts = 0
        will = NodeStateMessage(
            node=name,
            incarnation=incarnation,
            state=NodeState.OFFLINE,
            generation=0,
            step=0,
            reason="gone",
            at=timestamp(),
            devices=1,
            host="127.0.0.1",
        )
        self.session = MqttSession(
            daemon.address.broker,
            client_id=f"{name}-{incarnation}",
            subscriptions=[self.topics.node_command(name), self.topics.command],
            will=Will(topic=self.topics.node_state(name), payload=encode_json(will)),
            on_message=self._on_command,
            on_connected=self.hello,
        )

    async def __aenter__(self) -> "PlayedNode":
        self.task = asyncio.create_task(self.session.run())
        self.beating = asyncio.create_task(self._beat())
        await self.session.wait_connected(PATIENCE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self.beating, self.task):
            task.cancel()
        await asyncio.gather(self.beating, self.task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self.say(Heartbeat(generation=self.generation, committed=None))

    def _on_command(self, topic: str, payload: bytes, _retained: bool) -> None:
        meant: ToNode | None
        if topic == self.topics.command:
            meant = decode_to_nodes(payload).addressed(self.name, self.incarnation)
            self.broadcasts += meant is not None
        else:
            meant = decode_to_node(payload, self.name)
        if meant is None:
            return
        command = meant.command
        if isinstance(command, RequestHello):
            self.hello()
        self.commands.put_nowait(command)

    def say(self, message: Signal) -> None:
        signed = FromNode(node=self.name, incarnation=self.incarnation, signal=message)
        self.session.publish(self.topics.node_signal(self.name), encode_from_node(signed))

    def hello(self) -> None:
        self.say(
            Hello(
                facts=NodeFacts(devices=1, host="127.0.0.1", rendezvous_port=1000),
                job_id=self.job_id,
                prepared=self.job_id is not None,
                generation=self.generation,
                training=self.training,
            )
        )

    async def expect(self, kind: Any) -> Any:
        """Return the next command of this kind; skip others."""
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(command := await self.commands.get(), kind):
                pass
            return command

    async def start_training(self, job_id: str) -> int:
        """Take the node from the job's acceptance to its first steps; return the generation."""
        asked = await self.expect(Prepare)
        assert asked.job.job_id == job_id
        self.job_id = job_id
        self.say(Prepared(job_id=job_id, profile=PROFILE if asked.profile else None))
        quiesce = await self.expect(Quiesce)
        report = DeviceReport(
            device=0, committed_step=0, ready_step=None, vote=None, held=tuple(range(LAYERS))
        )
        self.generation = quiesce.generation
        self.say(Quiesced(generation=quiesce.generation, reports=(report,)))
        resume = await self.expect(Resume)
        assert resume.plan.nodes == (self.name,)
        assert resume.hosts == {self.name: "127.0.0.1"} and resume.rendezvous == "127.0.0.1:1000"
        self.training = True
        self.say(Resumed(generation=resume.generation, bytes_moved=0, rendezvous_s=0.01, state_s=0.0))
        self.step(resume.generation, 1, 3)
        return int(resume.generation)

    def step(self, generation: int, first: int, last: int) -> None:
        steps = tuple(
            CommittedStep(step=step, vote=Vote(loss=1 / step, gradient_norm=1.0))
            for step in range(first, last + 1)
        )
        self.say(Stepped(generation=generation, steps=steps, step_s=0.1))


def job_data(tmp_path: Path, failures: int = 0, tables: str = "") -> Any:
    (tmp_path / "train.py").write_text("def build(): ...\n")
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "gpt"\nsteps = 100\n'
        '[training]\nfunction = "train.py:build"\nglobal_batch = 16\nmicrobatch = 4\n'
        f"[tolerance]\nfailures = {failures}\n{tables}"
    )
    return load_job_data(path)


async def state_when(client: ClusterClient, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        data = (await client.request(StatusRequest(**client.envelope()), timeout_s=PATIENCE_S)).data
        assert data is not None
        if condition(data):
            return data
        assert time.monotonic() < deadline, data
        await asyncio.sleep(0.02)
