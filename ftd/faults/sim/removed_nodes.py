"""The check that every node that is gone for good is removed in the end."""

from typing import Any

from ftd.coordinator.coordinator import Coordinator
from ftd.faults.sim.journals import is_job_over, named_nodes
from ftd.faults.sim.simulation import Simulation
from statemachine.cluster.durable.records import assemble

_DUPLICATE_DELAY_S = 6.0
"""The extra time allowed, since duplicates may arrive that much later than their sender's end."""
_MAX_CHECKS = 3


class RemovedNodesCheck:
    """The check, once a second, that no node stays listed or retained after it is gone for good and not
    needed.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._leading: tuple[Coordinator, int] | None = None
        """The process that leads, and its term."""
        self._settled_at = 0.0
        self._seen: dict[str, int] = {}
        """Number of times in a row that each node was found although it should have been removed."""
        sim.world.call_later(1.0, self._check_all)

    def _check_all(self) -> None:
        sim, leader, timing = self._sim, self._sim.coordinator, self._sim.world.timing
        sim.world.call_later(1.0, self._check_all)
        leading = None
        if leader.process is not None and leader.leading and not leader.frozen and leader.reaches_broker:
            # A process that was deposed for less than a second leads in a later term, with what it reads then.
            leading = (leader.process, leader.process.leadership.machine.term)
        if leading is None or leading != self._leading:
            self._leading, self._settled_at = leading, sim.world.now
        late = sim.world.now - timing.remove_offline_s - _DUPLICATE_DELAY_S
        removed = [
            node.name for node in sim.nodes.values() if node.removed_at is not None and node.removed_at < late
        ]
        if removed and self._settled_at < late:
            self._check(set(removed), assemble(leader.machine.durable_state()))

    def _check(self, removed: set[str], journal: dict[str, Any]) -> None:
        """Check nodes that are gone for good. They may have been named by the journal until just now."""
        quiet = journal["phase"] == "RUNNING" and journal.get("recovery") is None
        unneeded = removed if is_job_over(journal) else removed - named_nodes(journal) if quiet else set()
        # A node whose last will died with the broker is retained as healthy: nobody can distinguish it from
        # a new one.
        offline = self._sim.network.offline()
        remaining = unneeded & {*journal["nodes"], *offline}
        self._seen = {name: self._seen.get(name, 0) + 1 for name in sorted(remaining)}
        for name in (name for name, count in self._seen.items() if count > _MAX_CHECKS):
            what = "is listed" if name in journal["nodes"] else "its state is retained"
            self._sim.invariants.violated(f"{name} is gone for good, but {what} still")
