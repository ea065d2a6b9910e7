"""Carries faults out over MQTT: asks nodes to do something to themselves."""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from ftd.errors import ConfigurationError, RequestRejected
from ftd.faults.chaos.targets import ClusterLayout, resolve_targets
from ftd.faults.chaos.values import Fault, NamedNodes, NodeFault, Scenario
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import ChaosRequest


def require_remote(scenario: Scenario, origin: str) -> None:
    """:raises ConfigurationError: the scenario has faults that need the processes in hand."""
    for fault in scenario.hands_on:
        raise ConfigurationError(
            f"{fault.id}: {fault.do} {fault.target} needs the processes in hand",
            field=origin,
            remedy="run it on a cluster of its own: ftd chaos run --local, or ftd local --chaos",
        )


def require_known_nodes(scenario: Scenario, nodes: Sequence[str], origin: str) -> None:
    """:raises ConfigurationError: a fault names a node that is not there and that nothing starts."""
    started = {name for fault in scenario.faults if fault.do == "start" for name in _named(fault)}
    for fault in scenario.faults:
        for name in _named(fault):
            if name not in started and name not in nodes:
                raise ConfigurationError(
                    f"{fault}: there is no {name}",
                    field=origin,
                    remedy=f'known: {", ".join(nodes)}; or start it with do = "start"',
                )


def _named(fault: Fault) -> tuple[str, ...]:
    return fault.target.names if isinstance(fault.target, NamedNodes) else ()


class RemoteInjector:
    """:param layout: who computes what now, for faults that strike a role.
    :param seed: for random targets, and for what nodes draw."""

    def __init__(self, client: ClusterClient, *, layout: Callable[[], ClusterLayout], seed: int = 0) -> None:
        self._client = client
        self._layout = layout
        self._seed = seed

    def resolve_targets(self, fault: Fault) -> tuple[str, ...]:
        """:raises PeerError: nobody has the role that the fault strikes."""
        return resolve_targets(fault, self._layout(), self._seed)

    async def inject(self, fault: Fault) -> tuple[str, ...]:
        """All nodes of the fault at once; answers which these were.

        :raises RequestRejected: a node says no (chaos is off there).
        :raises Unreachable: a node does not answer.
        :raises PeerError: nobody has the role.
        """
        nodes = self.resolve_targets(fault)
        await asyncio.gather(*(self._ask(fault, node) for node in nodes))
        return nodes

    async def check(self, scenario: Scenario) -> None:
        """Ask every node that may be struck whether it would do it, before anything is done.

        :raises ConfigurationError: one would not (chaos is off there, say); names the fault.
        :raises Unreachable: one does not answer.
        """
        alive = self._layout().alive
        asked = [
            (fault, node)
            for fault in scenario.faults
            if not fault.needs_hands
            for node in (n for n in _named(fault) or alive if n in alive)
        ]
        try:
            await asyncio.gather(*(self._ask(fault, node, dry_run=True) for fault, node in asked))
        except RequestRejected as error:
            raise ConfigurationError(f"{error}; nothing was injected", field=scenario.name) from None

    async def _ask(self, fault: Fault, node: str, *, dry_run: bool = False) -> None:
        envelope = self._client.envelope()
        request = ChaosRequest(
            request=envelope["request"],
            reply=envelope["reply"],
            do=cast(NodeFault, fault.do),
            target=fault.process,
            device=fault.device,
            for_s=fault.for_s,
            factor=fault.factor,
            size_mib=fault.size_mib,
            drop=fault.drop or None,
            duplicate=fault.duplicate or None,
            late_s=fault.late_s or None,
            seed=self._seed,
            dry_run=dry_run,
        )
        try:
            await self._client.request(request, topic=self._client.topics.chaos(node))
        except RequestRejected as error:
            raise RequestRejected(f"{fault.id}: {error}") from None
