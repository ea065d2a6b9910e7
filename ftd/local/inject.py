"""Carries faults out: over MQTT on any cluster, and with its own hands where the processes are ours."""

import asyncio
import time
from collections.abc import Callable
from typing import cast

from ftd.client import ClusterClient
from ftd.errors import ConfigurationError
from ftd.local.cluster import BROKER, COORDINATOR, LocalCluster
from ftd.local.scenario import LOCAL_FAULTS, Fault, NodeFault, Scenario
from ftd.wire.catalogue import severity_of
from ftd.wire.public import ChaosRequest, EventMessage, new_event_id, timestamp


def require_remote(scenario: Scenario, origin: str) -> None:
    """:raises ConfigurationError: the scenario has faults that only ``ftd local`` can do."""
    for fault in scenario.faults:
        if fault.do in LOCAL_FAULTS:
            raise ConfigurationError(
                f"{fault.do} needs the processes in hand",
                field=origin,
                remedy="run it with ftd local --chaos",
            )


def require_known_nodes(scenario: Scenario, nodes: list[str], origin: str) -> None:
    """:raises ConfigurationError: a fault names a node that is not there and that nothing starts."""
    started = {name for fault in scenario.faults if fault.do == "start" for name in fault.nodes}
    for fault in scenario.faults:
        for name in fault.nodes:
            if name not in started and name not in nodes:
                raise ConfigurationError(
                    f"{fault}: there is no {name}",
                    field=origin,
                    remedy=f'known: {", ".join(nodes)}; or start it with do = "start"',
                )


class RemoteInjector:
    """Asks nodes over MQTT to do something to themselves."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def inject(self, fault: Fault) -> None:
        """All nodes of the fault at once.

        :raises RequestRefused: a node says no (chaos is off there).
        :raises Unreachable: a node does not answer.
        """
        await asyncio.gather(*(self._ask(fault, node) for node in fault.nodes))

    async def _ask(self, fault: Fault, node: str) -> None:
        envelope = self._client.envelope()
        request = ChaosRequest(
            request=envelope["request"],
            reply=envelope["reply"],
            do=cast(NodeFault, fault.do),
            target=fault.target,
            device=fault.device,
            for_s=fault.for_s,
            factor=fault.factor,
        )
        await self._client.request(request, topic=self._client.topics.chaos(node))


class LocalInjector:
    """The same, and the faults of processes that are ours: broker, coordinator, nodes to start.

    :param on_start: told the name and process id of each node's daemon that is started.
    """

    def __init__(
        self, client: ClusterClient, cluster: LocalCluster, on_start: Callable[[str, int], None]
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._on_start = on_start
        self._remote = RemoteInjector(client)
        self.absent: set[str] = set()
        """Parts that are away on purpose."""

    async def inject(self, fault: Fault) -> None:
        """:raises FtdError: it could not be done."""
        match fault.do:
            case "start":
                for name in fault.nodes:
                    child = await self._cluster.start_node(name)
                    self._on_start(name, child.pid)
            case "kill_coordinator":
                await self._outage(fault, COORDINATOR)
                await self._cluster.start_coordinator()
                self.absent.discard(COORDINATOR)
            case "kill_broker":
                await self._outage(fault, BROKER)
                await self._cluster.start_broker()
                self.absent.discard(BROKER)
            case _:
                await self._remote.inject(fault)

    async def _outage(self, fault: Fault, name: str) -> None:
        self.absent.add(name)
        details = {"fault": fault.do, "at": time.monotonic(), "target": name}
        await self._client.announce(
            EventMessage(
                event="ChaosInjected",
                node=None,
                generation=None,
                step=None,
                reason=str(fault.trigger),
                at=timestamp(),
                monotonic=time.monotonic(),
                cause=f"scenario-{fault.do}",
                details=details,
                source="local",
                id=new_event_id(),
                severity=severity_of("ChaosInjected"),
            )
        )
        await self._cluster.kill(name)
        await asyncio.sleep(fault.restart_after_s)
