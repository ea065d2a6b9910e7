"""A simulated coordinator's disk and program: what outlives its process, and which journals it can read."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The leader's journal, as it is retained."""

    position: tuple[int, int]
    journal: dict[str, Any]
    edition: int
    """Of the program that wrote it."""


class Disk:
    """As ``ftd.coordinator.journal`` and ``restored`` have it."""

    def __init__(self) -> None:
        self.edition = 0
        """Of the program: each reads the journals of its own edition and of the one before."""
        self.journal: dict[str, Any] | None = None
        """What it wrote as the leader, or kept of the leader's."""
        self.position = (0, 0)
        self.foreign: Copy | None = None
        """The newest journal seen that it could not read."""
        self.shared = False
        """It once kept another one's."""

    def write(self, term: int, journal: dict[str, Any]) -> Copy:
        """The leader's own."""
        serial = self.position[1] + 1 if self.position[0] == term else 1
        self.position, self.journal = (term, serial), journal
        return Copy(position=self.position, journal=journal, edition=self.edition)

    def keep(self, copy: Copy) -> None:
        """What the leader's journal says."""
        if copy.position <= self.position:
            return
        if self.reads(copy):
            self.position, self.journal = copy.position, copy.journal
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
    def barred(self) -> str:
        return self.judge(self.foreign)
