"""Who is forgotten, of those that are gone for good: everybody in the end."""

from typing import Any

from ftd.coordinator.coordinator import Coordinator
from ftd.faults.sim.journals import named, over
from ftd.faults.sim.simulation import Simulation
from statemachine.cluster.durable.records import assemble

_LATE_S = 6.0
"""So much later, at most: what comes twice may come so long after who sent it is gone."""
_LOOKS = 3


class RemovedNodesCheck:
    """Looks every second who is listed and retained: nobody who is gone for good and whom nobody needs."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._leading: Coordinator | None = None
        self._settled_at = 0.0
        self._seen: dict[str, int] = {}
        """How often in a row each was listed or retained that should not be."""
        sim.world.call_later(1.0, self._look)

    def _look(self) -> None:
        sim, leader, timing = self._sim, self._sim.coordinator, self._sim.world.timing
        sim.world.call_later(1.0, self._look)
        leading = leader.process if leader.leading and not leader.frozen and leader.heard else None
        if leading is None or leading is not self._leading:
            self._leading, self._settled_at = leading, sim.world.now
        late = sim.world.now - timing.remove_offline_s - _LATE_S
        gone = [node.name for node in sim.nodes.values() if node.gone_at is not None and node.gone_at < late]
        if gone and self._settled_at < late:
            self._check(set(gone), assemble(leader.machine.durable_state()))

    def _check(self, gone: set[str], journal: dict[str, Any]) -> None:
        """It may have been named until just now."""
        quiet = journal["phase"] == "RUNNING" and journal.get("recovery") is None
        free = gone if over(journal) else gone - named(journal) if quiet else set()
        # Whose last will died with the broker is retained as healthy: nobody can tell it from a newcomer.
        offline = self._sim.network.offline()
        left = free & {*journal["nodes"], *offline}
        self._seen = {name: self._seen.get(name, 0) + 1 for name in sorted(left)}
        for name in (name for name, looks in self._seen.items() if looks > _LOOKS):
            what = "is listed" if name in journal["nodes"] else "its state is retained"
            self._sim.invariants.broken(f"{name} is gone for good, and {what} still")
