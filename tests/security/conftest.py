"""Fixtures: valid messages to corrupt, and daemons to attack."""

import zlib
from typing import Any

import msgspec
import pytest

from ftd.faults.sim.simulation_run import run_seed
from ftd.transport.wire import codec
from statemachine.agent.events import CommandArrived
from statemachine.agent.machine import AgentMachine
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import BroadcastCommand
from statemachine.events import SignalArrived
from tests.helpers.wire_messages import Wire, encoded


@pytest.fixture(scope="session")
def wire() -> Wire:
    heard = Wire()
    with pytest.MonkeyPatch.context() as patch:
        cluster, agent = ClusterMachine.steps, AgentMachine.step

        def signalled(self: ClusterMachine, events: Any, bug: Any) -> Any:
            for event in events:
                if isinstance(event, SignalArrived):
                    name = type(event.message.signal).__name__
                    heard.signals[name] = codec.encode_from_node(event.message)
            effects = cluster(self, events, bug)
            for effect in effects:
                if isinstance(effect, BroadcastCommand):
                    name, message = type(effect.command).__name__, encoded(effect)
                    sent = msgspec.msgpack.decode(message)
                    content = sent["content"]
                    heard.broadcasts[name] = zlib.decompress(content) if sent["compressed"] else content
            return effects

        def commanded(self: AgentMachine, event: Any) -> Any:
            if isinstance(event, CommandArrived):
                heard.commands[type(event.message.command).__name__] = codec.encode_to_node(event.message)
            return agent(self, event)

        patch.setattr(ClusterMachine, "steps", signalled)
        patch.setattr(AgentMachine, "step", commanded)
        for seed in range(12):
            run_seed(seed)
    assert len(heard.broadcasts) >= 6
    assert len(heard.signals) >= 12 and len(heard.commands) >= 9
    return heard
