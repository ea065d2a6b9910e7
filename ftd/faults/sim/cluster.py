"""A simulated cluster: a world with a broker, coordinators, nodes and a checkpoint store, and the invariants
that must hold.
"""

from collections.abc import Iterable

from ftd.faults.sim.broker_checks import BrokerChecks
from ftd.faults.sim.coordinator import STATE_PERIOD_S, SimCoordinator, leader_of
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
        state_period_s: float = STATE_PERIOD_S,
    ) -> None:
        """:param coordinators: the names of the coordinators."""
        self.world, self.policy, self.profile = world, policy, profile
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
        return leader_of(self.network, self.coordinators)
