"""Valid messages to spoil, and daemons to annoy."""

from typing import Any

import pytest

from ftd.sim.run import run_seed
from ftd.wire import codec
from statemachine.agent import AgentMachine
from statemachine.cluster import ClusterMachine
from statemachine.events import CommandArrived, SignalArrived


class Wire:
    """All that a few simulated clusters say, as bytes: one message of each kind."""

    def __init__(self) -> None:
        self.signals: dict[str, bytes] = {}
        self.commands: dict[str, bytes] = {}


@pytest.fixture(scope="session")
def wire() -> Wire:
    heard = Wire()
    with pytest.MonkeyPatch.context() as patch:
        cluster, agent = ClusterMachine.steps, AgentMachine.step

        def signalled(self: ClusterMachine, events: Any) -> Any:
            for event in events:
                if isinstance(event, SignalArrived):
                    name = type(event.message.signal).__name__
                    heard.signals[name] = codec.encode_from_node(event.message)
            return cluster(self, events)

        def commanded(self: AgentMachine, event: Any) -> Any:
            if isinstance(event, CommandArrived):
                heard.commands[type(event.message.command).__name__] = codec.encode_to_node(event.message)
            return agent(self, event)

        patch.setattr(ClusterMachine, "steps", signalled)
        patch.setattr(AgentMachine, "step", commanded)
        for seed in range(12):
            run_seed(seed)
    assert len(heard.signals) >= 12 and len(heard.commands) >= 9
    return heard
