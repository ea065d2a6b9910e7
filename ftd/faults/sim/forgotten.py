"""Who is forgotten, of those that are gone for good: everybody in the end, and nobody whom the job needs."""

from typing import TYPE_CHECKING, Any

from ftd.faults.sim import losses
from statemachine.cluster.durable.records import put_together
from statemachine.cluster.phases import OVER

if TYPE_CHECKING:
    from ftd.coordinator.coordinator import Coordinator
    from ftd.faults.sim.invariants import Invariants
    from ftd.faults.sim.run import Simulation

_LATE_S = 6.0
"""So much later, at most: what comes twice may come so long after who sent it is gone."""
_LOOKS = 3


def forgets(truth: "Invariants", kept: dict[str, Any] | None, name: str) -> None:
    """At the broker: ``name`` is forgotten, whom the journal names no more, and who has nothing that nobody
    else has."""
    journal = put_together(kept) if kept is not None else None
    if journal is None or _over(journal):
        return
    if name in _named(journal):
        truth.broken(f"{name} is forgotten, and the job's journal names it")
    if not truth.resumed_job:
        return  # What there is is step 0, which anybody can make.
    counting = [
        trainer
        for node in truth.nodes.values()
        for trainer in node.trainers.values()
        if trainer.able and trainer.generation >= truth.newest_resume and trainer.lineage == truth.lineage
    ]
    others = [trainer for trainer in counting if trainer.node.name != name]
    if losses.lacking(truth, others, truth.known) and not losses.lacking(truth, counting, truth.known):
        truth.broken(f"{name} is forgotten, and holds what nobody else does")


class Listed:
    """Looks every second who is listed and retained: nobody who is gone for good and whom nobody needs."""

    def __init__(self, sim: "Simulation") -> None:
        self._sim = sim
        self._leading: Coordinator | None = None
        self._settled_at = 0.0
        self._seen: dict[str, int] = {}
        """How often in a row each was listed or retained that should not be."""
        sim.world.at(1.0, self._look)

    def _look(self) -> None:
        sim, leader, timing = self._sim, self._sim.coordinator, self._sim.world.timing
        sim.world.at(1.0, self._look)
        leading = leader.process if leader.leading and not leader.frozen and leader.heard else None
        if leading is None or leading is not self._leading:
            self._leading, self._settled_at = leading, sim.world.now
        late = sim.world.now - timing.forget_s - _LATE_S
        gone = [node.name for node in sim.nodes.values() if node.gone_at is not None and node.gone_at < late]
        if gone and self._settled_at < late:
            self._check(set(gone), put_together(leader.machine.durable_state()))

    def _check(self, gone: set[str], journal: dict[str, Any]) -> None:
        """It may have been named until just now."""
        quiet = journal["phase"] == "RUNNING" and journal.get("recovery") is None
        free = gone if _over(journal) else gone - _named(journal) if quiet else set()
        # Whose last will died with the broker is retained as healthy: nobody can tell it from a newcomer.
        offline = self._sim.network.offline()
        left = free & {*journal["nodes"], *offline}
        self._seen = {name: self._seen.get(name, 0) + 1 for name in sorted(left)}
        for name in (name for name, looks in self._seen.items() if looks > _LOOKS):
            what = "is listed" if name in journal["nodes"] else "its state is retained"
            self._sim.invariants.broken(f"{name} is gone for good, and {what} still")


def _over(journal: dict[str, Any]) -> bool:
    return journal["job"] is None or journal["phase"] in OVER


def _named(journal: dict[str, Any]) -> set[str]:
    """By its plan, its generation, its snapshots, its recovery."""
    attempt, plan, persisting = journal.get("attempt"), journal.get("plan"), journal["persisting"]
    names = {*persisting["writers"], *journal.get("resumed_buddies", {}).values()}
    if (recovery := journal.get("recovery")) is not None:
        names |= set(recovery["nodes"])
    if attempt is not None:
        names |= {*attempt["members"], *attempt["sources"]}
        names |= set() if attempt["resume_sent"] else set(attempt["expected"])
    for pipeline in plan["pipelines"] if plan is not None else ():
        names |= {device["node"] for stage in pipeline["stages"] for device in stage["devices"]}
    for record in (journal["snapshot"], persisting["record"]):
        for group in record["groups"] if record is not None else ():
            names |= {*group["owners"], group["buddy"]}
    return names
