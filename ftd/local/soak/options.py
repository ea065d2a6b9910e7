"""The options of a soak, and the command that repeats it."""

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """The user's options."""

    job: Path
    minutes: float
    seed: int
    rate_per_min: float
    nodes: int
    coordinators: int
    """Number of coordinators; one leads, the others are standbys."""
    steps: int | None
    limit_s: float
    relative: float | None
    """The allowed relative difference of losses; ``None`` chooses it by the job (``rounding_tolerance``)."""
    beyond: bool
    """Whether more nodes may be lost at once than the job tolerates."""
    memory_mib: int | None
    """The size of a memory file system for the snapshots of all nodes, which may be filled; ``None`` uses the
    machine's own, which may not.
    """
    broker: str
    logs: Path | None

    @property
    def command(self) -> str:
        """The command that injects the same faults again, and checks the same rules."""
        parts = [
            f"ftd chaos soak --minutes {_exact(self.minutes)} --seed {self.seed}",
            f"--rate {_exact(self.rate_per_min)} --nodes {self.nodes}",
            f"--coordinators {self.coordinators}" if self.coordinators > 1 else "",
            f"--steps {self.steps}" if self.steps is not None else "",
            "--beyond" if self.beyond else "",
            f"--memory-mib {self.memory_mib}" if self.memory_mib is not None else "",
            f"--limit {_exact(self.limit_s)}",
            f"--tolerance {_exact(self.relative)}" if self.relative is not None else "",
            f"--broker {self.broker}",
            shlex.quote(str(self.job)),
        ]
        return " ".join(part for part in parts if part)


def _exact(number: float) -> str:
    """Return a number with all its digits: a seed draws other faults for another rate or duration."""
    return str(number).removesuffix(".0")
