"""Upgrades of coordinators while the cluster runs, one after the other, in any order."""

from random import Random

from ftd.faults.sim.coordinator import SimCoordinator
from ftd.faults.sim.simulation import Simulation

NEW = 1
"""The new program version; all coordinators begin with the one before it."""


def draw(sim: Simulation, rng: Random | None, until_s: float) -> None:
    """Schedule upgrades if there are several coordinators."""
    if len(sim.coordinators) < 2 or rng is None:
        return
    for coordinator in rng.sample(sim.coordinators, rng.randint(1, len(sim.coordinators))):
        sim.world.call_later(rng.uniform(0.0, until_s), _upgrade, sim, coordinator, rng.uniform(0.1, 3.0))


def finish(sim: Simulation) -> None:
    """Upgrade the remaining coordinators in the end, if any was upgraded."""
    if any(coordinator.program_version == NEW for coordinator in sim.coordinators):
        for coordinator in sim.coordinators:
            if coordinator.program_version != NEW:
                coordinator.crash()
                coordinator.program_version = NEW


def _upgrade(sim: Simulation, coordinator: SimCoordinator, away_s: float) -> None:
    if sim.healed or coordinator.program_version == NEW:
        return
    sim.log(f"{coordinator.name} gets another program")
    coordinator.crash()
    coordinator.program_version = NEW
    sim.world.call_later(away_s, coordinator.restart)
