"""A simulated cluster: a world with a broker, coordinators, nodes and a checkpoint store, and the invariants
that must hold.
"""

from collections.abc import Iterable

from ftd.faults.sim.broker_checks import BrokerChecks
from ftd.faults.sim.coordinator import STATE_PERIOD_S, SimCoordinator
from ftd.faults.sim.host import StepTiming
from ftd.faults.sim.invariants import Invariants
from ftd.faults.sim.network import SimNetwork
from ftd.faults.sim.node import SimNode
from ftd.faults.sim.world import World
from planner.values import ModelProfile, Policy


class SimCluster:
    """The parts of a simulated world. Initially its coordinators are not started, and it has no nodes."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        profile: ModelProfile,
        coordinators: Iterable[str],
        *,
        step_timing: StepTiming,
        state_period_s: float = STATE_PERIOD_S,
    ) -> None:
        """:param coordinators: the names of the coordinators."""
        self.world, self.policy, self.step_timing = world, policy, step_timing
        self.invariants = Invariants(world, policy, profile)
        self.versions = self.invariants.versions
        self.checkpoint_store = self.invariants.checkpoint_store
        self.nodes: dict[str, SimNode] = self.invariants.nodes
        self.network = SimNetwork(world)
        self.coordinators = [
            SimCoordinator(world, self.network, self.invariants, name, state_period_s=state_period_s)
            for name in coordinators
        ]
        self.broker_checks = BrokerChecks(self.network, self.invariants, self.coordinators)

    @property
    def coordinator(self) -> SimCoordinator:
        """The coordinator that leads; if none does, the one that most likely led last."""
        if (connection := self.network.leader) is not None:
            return next(one for one in self.coordinators if one.name == connection.host)
        return max(self.coordinators, key=lambda one: (one.leading, one.up, one.position))

    def make_node(self, name: str) -> SimNode:
        """Add a host, on which nothing runs yet."""
        node = self.nodes[name] = SimNode(
            self.invariants.groups,
            self.network,
            self.checkpoint_store,
            self.nodes,
            name,
            self.policy.devices_per_node,
            self.step_timing,
        )
        return node

    def start_if_down(self, node: SimNode) -> None:
        """Start the daemon of a node, unless it runs or the host is gone for good."""
        if not node.up and node.removed_at is None:
            node.start()

    def end(self) -> None:
        """End all processes, so that nothing keeps the world in memory."""
        for host in (*self.coordinators, *self.nodes.values()):
            host.loop.kill()
