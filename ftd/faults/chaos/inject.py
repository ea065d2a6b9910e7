"""The injection of faults over MQTT: nodes are asked to inject them into themselves."""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from ftd.errors import ConfigurationError, RequestRejected
from ftd.faults.chaos.targets import ClusterLayout, resolve_targets
from ftd.faults.chaos.values import Fault, NamedNodes, Scenario
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import ChaosRequest, NodeFault


def require_remote(scenario: Scenario, origin: str) -> None:
    """Check that all faults can be injected over MQTT.

    :raises ConfigurationError: a fault needs the processes of a local cluster.
    """
    for fault in scenario.local_faults:
        raise ConfigurationError(
            f"{fault.id}: {fault.do} {fault.target} needs a local cluster",
            field=origin,
            remedy="run it on one: ftd chaos run --local, or ftd local --chaos",
        )


def require_known_nodes(scenario: Scenario, nodes: Sequence[str], origin: str) -> None:
    """Check that every named node exists or is started by the scenario.

    :raises ConfigurationError: a fault names a node that does not exist and that no fault starts.
    """
    started = {name for fault in scenario.faults if fault.do == "start" for name in _named_nodes(fault)}
    for fault in scenario.faults:
        for name in _named_nodes(fault):
            if name not in started and name not in nodes:
                raise ConfigurationError(
                    f"{fault}: there is no {name}",
                    field=origin,
                    remedy=f'known: {", ".join(nodes)}; or start it with do = "start"',
                )


def _named_nodes(fault: Fault) -> tuple[str, ...]:
    return fault.target.names if isinstance(fault.target, NamedNodes) else ()


class RemoteInjector:
    """An injector of faults into nodes over MQTT.

    :param layout: returns which node computes what now, for faults that target a role.
    :param seed: seeds the choice of random targets and what the nodes draw.
    """

    def __init__(self, client: ClusterClient, *, layout: Callable[[], ClusterLayout], seed: int = 0) -> None:
        self._client = client
        self._layout = layout
        self._seed = seed

    def resolve_targets(self, fault: Fault) -> tuple[str, ...]:
        """Return the nodes that the fault targets now.

        :raises PeerError: no node has the targeted role.
        """
        return resolve_targets(fault, self._layout(), self._seed)

    async def inject(self, fault: Fault) -> tuple[str, ...]:
        """Inject the fault into all of its nodes at once, and return their names.

        :raises RequestRejected: a node rejects the fault (chaos is off there).
        :raises Unreachable: a node does not answer.
        :raises PeerError: no node has the targeted role.
        """
        nodes = self.resolve_targets(fault)
        await asyncio.gather(*(self._ask(fault, node) for node in nodes))
        return nodes

    async def check(self, scenario: Scenario) -> None:
        """Ask every node that may be a target whether it would accept the fault, before anything is injected.

        :raises ConfigurationError: a node would reject it, for example because chaos is off there; the
            error names the fault.
        :raises Unreachable: a node does not answer.
        """
        alive = self._layout().alive
        requests = [
            (fault, node)
            for fault in scenario.faults
            if not fault.needs_local_cluster
            for node in (n for n in _named_nodes(fault) or alive if n in alive)
        ]
        try:
            await asyncio.gather(*(self._ask(fault, node, dry_run=True) for fault, node in requests))
        except RequestRejected as error:
            raise ConfigurationError(f"{error}; nothing was injected", field=scenario.name) from None

    async def _ask(self, fault: Fault, node: str, *, dry_run: bool = False) -> None:
        request = ChaosRequest(
            **self._client.envelope(),
            do=cast(NodeFault, fault.do),
            target=fault.process,
            device=fault.device,
            for_s=fault.for_s,
            factor=fault.factor,
            size_mib=fault.size_mib,
            drop=fault.drop or None,
            duplicate=fault.duplicate or None,
            late_s=fault.late_s or None,
            how=fault.how if fault.do == "bad_device" else None,
            seed=self._seed,
            dry_run=dry_run,
        )
        try:
            await self._client.request(request, topic=self._client.topics.chaos(node))
        except RequestRejected as error:
            raise RequestRejected(f"{fault.id}: {error}") from None
