"""What the simulated broker retains, for whoever comes later."""

from dataclasses import dataclass, field, replace

from ftd.faults.sim.disk import Copy
from statemachine.election.leadership import Leader, Peer


@dataclass(slots=True, kw_only=True)
class Retained:
    nodes: dict[str, tuple[bool, int]] = field(default_factory=dict)
    """Per node: (OFFLINE, incarnation)."""
    remains: list[Peer] = field(default_factory=list)
    """Last wills of watches whose processes died, until a leader removes them."""
    leader: Leader | None = None
    gone: int = 0
    """The leader whose last will is retained as the cluster's state; 0: none."""
    journal: Copy | None = None

    def saved(self) -> "Retained":
        """As a broker that persists it writes it to its disk now."""
        return replace(self, nodes=dict(self.nodes), remains=list(self.remains))
