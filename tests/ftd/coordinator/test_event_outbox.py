"""Decisions are published even if the coordinator is killed before it publishes them: real processes, killed
at every such moment.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ftd.transport.client import ClusterClient
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.public import StopRequest, SubmitRequest
from ftd.transport.wire.topics import Topics
from statemachine.messages.cluster import Command, Prepare, Quiesced, RequestHello, Resume
from statemachine.messages.common import Prepared, Quiesce, Resumed
from statemachine.messages.values import DeviceReport
from tests.helpers.brokers import RunningBroker
from tests.helpers.coordinator_process import (
    LAYERS,
    PROFILE,
    ROOT,
    Daemon,
    PlayedNode,
    job_data,
    state_when,
)
from tests.helpers.waiting import PATIENCE_S

KILLED = """
import os, signal, sys
from ftd.coordinator.events import EventStream
from statemachine.cluster.durable.outbox import EventOutbox
moment, name = sys.argv.pop(1), sys.argv.pop(1)
real_publish, real_acknowledge, ids = EventStream._publish, EventOutbox.acknowledge, set()
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def publish(stream, message):
    if message.event == name and moment == "journaled":
        kill()
    if message.event == name:
        ids.add(message.id)
    real_publish(stream, message)
def acknowledged(outbox, number):
    if number in ids:
        kill()
    real_acknowledge(outbox, number)
EventStream._publish, EventOutbox.acknowledge = publish, acknowledged
from ftd.cli.main import main
main()
"""
"""``journaled``: the event is in the journal, and not published. ``published``: the broker has acknowledged
it, and the journal does not know that.
"""


class KilledCoordinator(Daemon):
    """A coordinator that kills itself when it first publishes a given event; its next process is an ordinary
    one.
    """

    def start_and_kill(self, moment: str, event: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", KILLED, moment, event, "coordinator", "--config", str(self.config)],
                stderr=log, stdout=log, cwd=ROOT,
            )  # fmt: skip

    async def come_back(self) -> None:
        assert self.process is not None
        assert await asyncio.to_thread(self.process.wait, PATIENCE_S) == -9
        self.start()


class Listener:
    """A client that records all messages on the topic of events."""

    def __init__(self, daemon: Daemon) -> None:
        self.received: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.session = MqttSession(
            daemon.address.broker,
            client_id="listener",
            subscriptions=[Topics(cluster="t").events],
            on_message=self._on_event,
        )

    def _on_event(self, topic: str, payload: bytes, retained: bool) -> None:
        self.received.append(json.loads(payload))
        self.news.set()

    def ids(self, event: str) -> Counter[str]:
        return Counter(one["id"] for one in self.received if one["event"] == event)

    async def wait_for(self, event: str) -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            while not self.ids(event):
                self.news.clear()
                await self.news.wait()


class ObedientNode(PlayedNode):
    """A node that obeys, and repeats its reports if the coordinator that received them was killed."""

    def _on_command(self, topic: str, payload: bytes, retained: bool) -> None:
        super()._on_command(topic, payload, retained)
        while not self.commands.empty():
            self.obey(self.commands.get_nowait())

    def obey(self, command: Command) -> None:
        match command:
            case Prepare():
                self.job_id = command.job.job_id
                self.say(Prepared(job_id=self.job_id, profile=PROFILE if command.profile else None))
            case Quiesce():
                self.generation, self.training = command.generation, False
                report = DeviceReport(
                    device=0, committed_step=0, ready_step=None, vote=None, held=tuple(range(LAYERS))
                )
                self.say(Quiesced(generation=command.generation, reports=(report,)))
            case Resume():
                self.generation, self.training = command.generation, True
                self.say(
                    Resumed(generation=command.generation, bytes_moved=0, rendezvous_s=0.01, state_s=0.0)
                )
                self.step(command.generation, 1, 3)
            case RequestHello() if self.training:
                self.step(self.generation, 1, 3)
            case _:
                pass


async def play(daemon: KilledCoordinator, listener: Listener, tmp_path: Path) -> None:
    """Run a job from its submission to its end, with a client that asks again if it gets no answer."""
    async with ObedientNode(daemon, "node-0"), ClusterClient(daemon.address) as client:
        submit = SubmitRequest(**client.envelope(), job=job_data(tmp_path))
        job_id = (await client.request(submit, timeout_s=PATIENCE_S)).detail
        await listener.wait_for("RecoveryCompleted")
        stop = StopRequest(**client.envelope(), job=job_id)
        await client.request(stop, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("moment", ["journaled", "published"])
@pytest.mark.parametrize("event", ["JobSubmitted", "StepCommitted", "JobStopped"])
def test_decisions_are_published_after_a_kill(
    tmp_path: Path, mosquitto: RunningBroker, moment: str, event: str
) -> None:
    """It is published once, or twice under one id, and recorded once."""
    daemon = KilledCoordinator(tmp_path, mosquitto.port)

    async def scene() -> None:
        listener = Listener(daemon)
        listening = asyncio.create_task(listener.session.run())
        await listener.session.wait_connected(PATIENCE_S)
        daemon.start_and_kill(moment, event)
        back = asyncio.create_task(daemon.come_back())
        async with asyncio.timeout(3 * PATIENCE_S):
            await play(daemon, listener, tmp_path)
        await listener.wait_for("JobStopped")
        await back
        async with ClusterClient(daemon.address) as client:
            await state_when(client, lambda s: s["phase"] == "FINISHED")
            history = [e for e in await client.history() if e["event"] == event]
            steps = await client.history(what="steps")
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        ids = listener.ids(event)
        published = [e for e in listener.received if e["event"] == event]
        if event == "StepCommitted":
            assert [s["step"] for s in steps] == [1, 2, 3]
            assert sorted({(e["step"], e["id"]) for e in published}) == sorted(
                {e["step"]: (e["step"], e["id"]) for e in published}.values()
            )
            assert [*dict.fromkeys(e["step"] for e in published)] == [1, 2, 3]
        else:
            assert len(ids) == 1 and [e["id"] for e in history] == list(ids)
        assert max(ids.values()) == (1 if moment == "journaled" else 2)
        plain = [{k: v for k, v in e.items() if k not in ("at", "monotonic")} for e in published]
        assert all(one == other for one in plain for other in plain if one["id"] == other["id"])

    try:
        asyncio.run(scene())
    finally:
        if daemon.process is not None:
            daemon.end()
    assert "Traceback" not in daemon.said(), daemon.said()
