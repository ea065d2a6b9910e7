"""A simulated daemon's health checks: how long they take, and what they find on a bad device."""

from random import Random

from ftd.faults.sim.host import SimHost
from statemachine.agent.events import HealthCheckEnded
from statemachine.effects import RunHealthCheck, StopHealthCheck
from statemachine.messages.values import DeviceHealth, HealthReport, LinkHealth, PlantedFault

_TAKES_S = (0.02, 0.5)
_HUNG_S = 2.0
"""Time after which a test that hangs is ended."""
_GFLOPS = 100.0
_SLOW_GFLOPS = 25.0


class SimHealthChecks:
    """The health checks of one daemon, as ``ftd.node.health``."""

    def __init__(self, node: SimHost, devices: int) -> None:
        self._node, self._devices = node, devices
        self._rng = Random(
            f"health {node.world.seed} {node.name}"
        )  # A generator of its own: see ``drawing``.
        self._current = 0
        self.planted: PlantedFault = ""
        """Fault of the devices in the checks that begin now."""

    def perform(self, effect: RunHealthCheck | StopHealthCheck) -> None:
        self._current += 1
        if isinstance(effect, RunHealthCheck):
            takes_s = _HUNG_S if self.planted == "hung" else self._rng.uniform(*_TAKES_S)
            node = self._node
            node.world.call_later(takes_s, self._end, effect, self.planted, self._current, node.life)

    def _end(self, effect: RunHealthCheck, planted: PlantedFault, current: int, life: int) -> None:
        node = self._node
        if current != self._current or life != node.life:
            return
        gflops = _SLOW_GFLOPS if planted == "slow" else _GFLOPS * self._rng.uniform(0.9, 1.1)
        device = DeviceHealth(
            device=0,
            kind="simulated",
            wrong="a product is wrong" if planted == "wrong" else "",
            failed="its test did not end" if planted == "hung" else "",
            compute_gflops=0.0 if planted == "hung" else gflops,
        )
        links = tuple(
            LinkHealth(node=peer.node, latency_ms=0.1, mb_s=1000.0 * self._rng.uniform(0.8, 1.2))
            for peer in effect.peers
            if node.hosts[peer.node].serves(node)
        )
        report = HealthReport(number=effect.number, devices=(device,), links=links)
        if planted == "wrong" and not effect.peers:  # The check that a node has to pass before it takes part.
            node.oracle.on_wrong_device(node.name, node.agent.incarnation)
        node.feed(HealthCheckEnded(at=node.world.now, cause="health", report=report))
