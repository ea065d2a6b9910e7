"""Scenarios on a cluster that runs already, played over MQTT."""

import asyncio
from collections.abc import Callable
from typing import Any

from ftd.errors import ConfigurationError
from ftd.faults.chaos.inject import RemoteInjector, require_known_nodes, require_remote
from ftd.faults.chaos.player import ScenarioPlayer, ScenarioResult
from ftd.faults.chaos.targets import read_layout
from ftd.faults.chaos.values import SameLosses, Scenario
from ftd.transport.address import ClusterAddress
from ftd.transport.client import ClusterClient

STATE_S = 5.0


async def play_remotely(
    address: ClusterAddress, scenario: Scenario, *, report: Callable[[str], None]
) -> ScenarioResult:
    """Play a scenario now. The faults disturb the job that is running.

    :raises ConfigurationError: the scenario needs a local cluster or names nodes that do not exist, or a
        node would reject a fault; nothing was injected.
    :raises Unreachable: there is no cluster.
    """
    require_remote(scenario, scenario.name)
    if any(isinstance(one, SameLosses) for one in scenario.expect):
        raise ConfigurationError(
            "same_losses needs a run without faults to compare with",
            field=scenario.name,
            remedy="run it with --local, or leave same_losses out",
        )
    state: dict[str, Any] = {}
    player: ScenarioPlayer | None = None

    def on_state(update: dict[str, Any]) -> None:
        state.clear()
        state.update(update)
        if player is not None:
            player.on_state(update)

    def on_node(node: str, node_state: str) -> None:
        if player is not None:
            player.on_node(node, node_state)

    async with ClusterClient(address, listen=True, on_state=on_state, on_node=on_node) as client:
        await client.state(STATE_S)
        require_known_nodes(scenario, read_layout(state).alive, scenario.name)
        injector = RemoteInjector(client, layout=lambda: read_layout(state), seed=scenario.seed)
        await injector.check(scenario)
        player = ScenarioPlayer(scenario, inject=injector.inject, report=report)
        player.on_state(dict(state))
        player.start()
        following = asyncio.ensure_future(_follow(client, player))
        try:
            return await player.wait_for_result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _follow(client: ClusterClient, player: ScenarioPlayer) -> None:
    async for event in client.events():
        player.on_event(event)
