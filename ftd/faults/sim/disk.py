"""A simulated coordinator's disk and program: what outlives its process, and which journals it can read."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from statemachine.cluster.durable.durable import moved
from statemachine.cluster.durable.promises import RESERVED, beyond, promised
from statemachine.messages.values import ClusterPhase

if TYPE_CHECKING:
    from ftd.faults.sim.run import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The leader's journal, as it is retained."""

    position: tuple[int, int]
    journal: dict[str, Any]
    edition: int
    """Of the program that wrote it."""
    clock_s: float
    """Of the host that wrote it."""


class Disk:
    """As ``ftd.coordinator.journal`` and ``restored`` have it."""

    def __init__(self) -> None:
        self.edition = 0
        """Of the program: each reads the journals of its own edition and of the one before."""
        self.journal: dict[str, Any] | None = None
        """What it wrote as the leader, or kept of the leader's."""
        self.position = (0, 0)
        self.clock_s = self.written_s = 0.0
        """So much the host's clock is ahead of the world's; and the clock that the journal's times are of."""
        self.foreign: Copy | None = None
        """The newest journal seen that it could not read."""
        self.shared = False
        """It once kept another one's."""
        self.knew = self.position
        """Before the power failed."""
        self.full_until = 0.0
        """Nothing can be written before this."""
        self.reserved = self.floor = 0
        self._forced: tuple[Any, ...] = ()
        self._unforced: list[tuple[tuple[int, int], dict[str, Any] | None, float]] = []
        """Since something was forced, and that."""

    def write(self, term: int, parts: dict[str, Any], chance: Random) -> Copy:
        """The leader's own, of ``durable.write``. ``chance``: whether the next quiet moment has come."""
        serial = self.position[1] + 1 if self.position[0] == term else 1
        journal: dict[str, Any] = msgspec.to_builtins(parts)
        self._set((term, serial), journal, self.clock_s)
        promise = promised(parts)
        if promise != self._forced or journal["generation"] > self.reserved:
            self._force()
        self._forced = promise
        if journal["phase"] == ClusterPhase.RUNNING and chance.random() < 0.3:
            self.reserved = journal["generation"] + RESERVED
            self._force()
        return Copy(position=self.position, journal=journal, edition=self.edition, clock_s=self.clock_s)

    def _set(self, position: tuple[int, int], journal: dict[str, Any], clock_s: float) -> None:
        self._unforced.append((self.position, self.journal, self.written_s))
        self.position, self.journal, self.written_s = position, journal, clock_s

    def _force(self) -> None:
        self._unforced.clear()

    def lose_power(self, chance: Random) -> None:
        """Of what was not forced some is gone, from the end; and the clock begins anew."""
        self.knew = max(self.knew, self.position)
        self._unforced.append((self.position, self.journal, self.written_s))
        self.position, self.journal, self.written_s = chance.choice(self._unforced)
        self.clock_s /= 2  # Never below zero, as real ones.
        self._force()
        self.floor = self.reserved

    def begin(self, journal: dict[str, Any], written_s: float) -> dict[str, Any]:
        """From this, its own or another one's, with times of that clock."""
        return beyond(moved(journal, self.clock_s - written_s), self.floor)

    def keep(self, copy: Copy) -> None:
        """What the leader's journal says."""
        if copy.position <= self.position:
            return
        if self.reads(copy):
            self._set(copy.position, copy.journal, copy.clock_s)
            self.shared = True
        else:
            self.foreign = copy

    def reads(self, copy: Copy) -> bool:
        return self.edition - 1 <= copy.edition <= self.edition

    def judge(self, copy: Copy | None) -> str:
        """Why it could not begin from this; empty: it could."""
        foreign = copy is not None and copy.position > self.position and not self.reads(copy)
        return "another edition" if foreign else ""

    @property
    def ineligible(self) -> str:
        return self.judge(self.foreign)


def fill_disk(sim: "Simulation") -> None:
    """A coordinator that cannot write its journal ends, and again when it is started."""
    coordinator, for_s = sim.world.rng.choice(sim.coordinators), sim.world.between(0.5, 8.0)
    sim.log(f"the disk of {coordinator.name} is full for {for_s:.2f} s")
    coordinator.disk.full_until = sim.world.now + for_s


def power_cut(sim: "Simulation") -> None:
    """The broker's host and the leader's are one, and without power for a moment."""
    sim.network.stop_broker(sim.world.between(0.1, 3.0))
    leader = sim.coordinator
    leader.crash()
    leader.disk.lose_power(sim.world.rng)
    sim.world.at(sim.world.between(0.5, 4.0), leader.restart)
