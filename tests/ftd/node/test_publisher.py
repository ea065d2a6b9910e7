"""The retained state of a node: published at once or a moment later, and never an old one last."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftd.config.daemon import load_daemon_config
from ftd.driver import SystemClock
from ftd.node import publisher
from ftd.node.message_faults import MessageFaultInjector
from ftd.node.ports import NodeObserver
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.public import NodeStateMessage, decode_json
from ftd.transport.wire.topics import Topics
from statemachine.effects import PublishNode
from statemachine.messages.cluster import Reject, RequestHello, Stop
from statemachine.messages.values import NodeState
from tests.helpers.brokers import RunningBroker
from tests.helpers.waiting import PATIENCE_S, until_async


def effect(state: NodeState, reason: str) -> PublishNode:
    return PublishNode(cause="c", state=state, generation=1, step=2, reason=reason)


class Scene:
    """One node's publisher, and what another client receives of its state."""

    def __init__(self, broker: RunningBroker, directory: Path) -> None:
        config = directory / "ftd.toml"
        config.write_text(f'[broker]\nurl = "mqtt://127.0.0.1:{broker.port}"\n[node]\nname = "n"\n')
        self.heard: asyncio.Queue[NodeStateMessage] = asyncio.Queue()
        self.ups = 0
        ports: Any = SimpleNamespace(
            clock=SystemClock(),
            open_session=partial(MqttSession, load_daemon_config(config).broker),
            observer=NodeObserver(),
        )
        self.publisher = publisher.NodePublisher(
            load_daemon_config(config),
            ports,
            7,
            message_faults=MessageFaultInjector("n"),
            on_message=lambda *_: None,
            on_connected=self._up,
            on_lost=lambda: None,
        )
        self.listener = MqttSession(
            load_daemon_config(config).broker,
            client_id="listener",
            subscriptions=(Topics(cluster="ftd").node_state(),),
            on_message=lambda _, payload, __: self.heard.put_nowait(decode_json(payload, NodeStateMessage)),
        )

    def _up(self) -> None:
        self.ups += 1

    async def reasons(self, count: int) -> list[str]:
        """Return the reasons of the next states that are received."""
        return [(await asyncio.wait_for(self.heard.get(), PATIENCE_S)).reason for _ in range(count)]


@asynccontextmanager
async def scene(broker: RunningBroker, directory: Path) -> AsyncIterator[Scene]:
    made = Scene(broker, directory)
    listening = asyncio.ensure_future(made.listener.run())
    await made.listener.wait_connected(PATIENCE_S)
    await until_async(lambda: made.publisher.session.connected)
    try:
        yield made
    finally:
        await made.publisher.close(1.0)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


def test_a_state_is_published_at_once_and_its_reason_later(
    mosquitto: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "STATE_PERIOD_S", 3600.0)

    async def play() -> None:
        async with scene(mosquitto, tmp_path) as the:
            the.publisher.publish_state(effect(NodeState.HEALTHY, "started"))
            the.publisher.publish_state(effect(NodeState.HEALTHY, "quiescing"))
            the.publisher.publish_state(effect(NodeState.HEALTHY, "resuming"))
            the.publisher.publish_state(effect(NodeState.SNAP, "a snapshot"))
            the.publisher.publish_state(effect(NodeState.SNAP, "of another step"))
            the.publisher.publish_state(effect(NodeState.HEALTHY, "abandoned"))
            the.publisher.publish_state(effect(NodeState.HEALTHY, "idle"))
            assert await the.reasons(3) == ["started", "a snapshot", "abandoned"]
            the.publisher.publish_state_now()  # Another process published in our place.
            assert await the.reasons(1) == ["idle"]
            the.publisher.session.interrupt(0.0)
            assert await the.reasons(1) == ["the connection to the broker broke"]
            await until_async(lambda: the.ups == 2)
            the.publisher.publish_state(effect(NodeState.HEALTHY, "back"))
            assert await the.reasons(1) == ["back"]
            the.publisher.publish_state(effect(NodeState.HEALTHY, "training"))
        assert await the.reasons(1) == ["training"]  # Published before it disconnected.
        assert the.heard.empty()

    asyncio.run(play())


def test_a_node_that_is_admitted_after_a_rejection_publishes_its_state_again(
    mosquitto: RunningBroker, tmp_path: Path
) -> None:
    """The last will of an older incarnation may be retained, and nothing may change for long."""

    async def play() -> None:
        async with scene(mosquitto, tmp_path) as the:
            the.publisher.observe_command(Reject(reason="the name is taken"))
            the.publisher.publish_state(effect(NodeState.HEALTHY, "rejected"))
            the.publisher.observe_command(RequestHello())
            await the.publisher.session.flush(PATIENCE_S)
            assert the.heard.empty()
            the.publisher.observe_command(Stop(job_id="job", reason="test"))
            assert await the.reasons(1) == ["rejected"]

    asyncio.run(play())


def test_of_several_reasons_the_last_is_published(mosquitto: RunningBroker, tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(mosquitto, tmp_path) as the:
            the.publisher.publish_state(effect(NodeState.HEALTHY, "started"))
            for number in range(50):
                the.publisher.publish_state(effect(NodeState.HEALTHY, str(number)))
            assert await the.reasons(2) == ["started", "49"]
            the.publisher.publish_state(effect(NodeState.HEALTHY, "later"))
            assert await the.reasons(1) == ["later"]
            the.publisher.publish_state(effect(NodeState.HEALTHY, "leaving"))
            the.publisher.publish_state(effect(NodeState.OFFLINE, "left"))
            assert await the.reasons(1) == ["left"]

    asyncio.run(play())
