"""What a soak was asked for, and the command that asks for it again."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """What the user asked for."""

    job: Path
    minutes: float
    seed: int
    rate_per_min: float
    nodes: int
    coordinators: int
    """One leads, the others stand by."""
    steps: int | None
    limit_s: float
    relative: float | None
    """``None``: by the job's precision."""
    beyond: bool
    """More nodes may be lost at once than the job tolerates."""
    memory_mib: int | None
    """Snapshots of all nodes live in a memory file system of this size, which may be filled; ``None``: in
    the machine's own, which may not."""
    broker: str
    logs: Path | None

    @property
    def command(self) -> str:
        """Brings the same faults again."""
        parts = [
            f"ftd chaos soak --minutes {self.minutes:g} --seed {self.seed}",
            f"--rate {self.rate_per_min:g} --nodes {self.nodes}",
            f"--coordinators {self.coordinators}" if self.coordinators > 1 else "",
            f"--steps {self.steps}" if self.steps is not None else "",
            "--beyond" if self.beyond else "",
            f"--memory-mib {self.memory_mib}" if self.memory_mib is not None else "",
            str(self.job),
        ]
        return " ".join(part for part in parts if part)
