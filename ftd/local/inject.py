"""The injection of faults into a local cluster: directly where the processes are ours, otherwise over MQTT."""

import asyncio
import time
from collections.abc import Callable

from ftd.errors import FtdError, PeerError
from ftd.faults.chaos.inject import RemoteInjector
from ftd.faults.chaos.targets import ClusterLayout
from ftd.faults.chaos.values import CentralService, Fault, Service
from ftd.local.cluster import BROKER, COORDINATOR, LocalCluster
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import event_message
from statemachine.effects import EmitEvent


class LocalInjector(RemoteInjector):
    """An injector of faults into a local cluster. Faults of the broker, the coordinators, the network and
    nodes to start are done directly; all others go over MQTT.
    """

    def __init__(
        self,
        client: ClusterClient,
        cluster: LocalCluster,
        *,
        layout: Callable[[], ClusterLayout],
        seed: int = 0,
    ) -> None:
        super().__init__(client, layout=layout, seed=seed)
        self._cluster = cluster
        self.absent: set[str] = set()
        """Processes that are away on purpose."""

    async def inject(self, fault: Fault) -> tuple[str, ...]:
        """Inject a fault and return the nodes that it targeted.

        :raises FtdError: the fault could not be injected.
        """
        match fault.target, fault.do:
            case CentralService(service=part), "kill":
                await self._outage(fault, part)
            case CentralService(service=part), _:
                await self._announce(fault, part)
                await self._cluster.freeze(self._process(part), fault.for_s or 0.0)
            case _, "cut":
                return await self._cut(fault)
            case _, "start":
                for name in self.resolve_targets(fault):
                    await self._cluster.start_node(name)
            case _:
                return await super().inject(fault)
        return self.resolve_targets(fault)

    async def _outage(self, fault: Fault, part: Service) -> None:
        name = self._process(part)
        self.absent.add(name)
        try:
            await self._announce(fault, part)
            await self._cluster.kill(name)
        except FtdError:  # It runs as before, or ended by itself, which its monitor reports.
            self.absent.discard(name)
            raise
        await asyncio.sleep(fault.restart_after_s)
        try:
            await self._cluster.restart(name)
        finally:  # If it did not start, its monitor reports that it has ended.
            self.absent.discard(name)

    def _process(self, part: Service) -> str:
        """Return the process of a service; of several coordinators, the one that leads."""
        if part == "broker":
            return BROKER
        leader = self._layout().leader
        return leader if leader in self._cluster.coordinators else COORDINATOR

    async def _cut(self, fault: Fault) -> tuple[str, ...]:
        """Unplug the nodes' network cables, and plug them in again."""
        network = self._cluster.network
        if network is None:
            raise PeerError("cut needs nodes with networks of their own (network = true under [cluster])")
        nodes = self.resolve_targets(fault)
        await self._announce(fault, "node", nodes)
        try:
            for node in nodes:
                network.cut(node)
            await asyncio.sleep(fault.duration_s)
        finally:
            for node in nodes:
                network.heal(node)
        return nodes

    async def _announce(self, fault: Fault, target: str, nodes: tuple[str, ...] = ()) -> None:
        for node in nodes or (None,):
            details = {"fault": fault.do, "at": time.monotonic(), "target": target, "for_s": fault.for_s}
            event = EmitEvent(
                cause=f"scenario-{fault.do}",
                name="ChaosInjected",
                reason=str(fault.trigger),
                node=node,
                details=details,
            )
            await self._client.publish_event(event_message(event, monotonic=time.monotonic(), source="local"))
