"""Reads the file of ``ftd reliability``: a cluster's failure rates, its protection, and the cost of a
checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftd.config.validation import convert, read_toml, require_positive
from ftd.errors import ConfigurationError
from planner.errors import InfeasibleError
from planner.reliability import FailureDistribution, ProtectedCluster

DAY_S = 86_400.0
SHAPES = (0.1, 10.0)
"""Range of the shape of a law. Above it nearly all nodes fail at the same age, and its powers of days do not fit a
float; below it nearly all fail at once.
"""


class FailureLawTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[hardware]``, ``[trainer]``, ``[snapshots]``: survival exp(−rate·t^shape), with t in days."""

    rate: float | None = None
    """Rate λ of one node; alternatively ``mean_days``, the corresponding mean time to failure."""
    mean_days: float | None = None
    shape: float = 1.0


class PersistTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[persist]``: persistent checkpoints."""

    cost_s: float = 60.0
    """Training time that one persistent checkpoint costs, in seconds."""


class RepairTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[repair]``: replacement of lost nodes."""

    hours: float = 1.0
    """Hours from the loss of a node until another node has replaced it and is protected."""
    horizon_days: float = 30.0
    """Duration of the job in days."""


class ReliabilityFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file as written."""

    nodes: int
    group: int
    losses: int = 1
    threshold: float = 0.9
    hardware: FailureLawTable
    trainer: FailureLawTable = FailureLawTable(rate=0.0)
    snapshots: FailureLawTable = FailureLawTable(rate=0.0)
    persist: PersistTable = PersistTable()
    repair: RepairTable = RepairTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityInput:
    """Checked content of the file."""

    protection: ProtectedCluster
    threshold: float
    persist_days: float
    repair_days: float
    horizon_days: float


def load_reliability(path: Path) -> ReliabilityInput:
    """Read and check a file.

    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    file = convert(read_toml(path), ReliabilityFile, where=path.name)
    if not 0 < file.threshold < 1:
        raise ConfigurationError(
            f"{file.threshold} is not allowed", field="threshold", remedy="write a probability such as 0.9"
        )
    require_positive(file.persist.cost_s, "persist.cost_s")
    require_positive(file.repair.hours, "repair.hours")
    require_positive(file.repair.horizon_days, "repair.horizon_days")
    try:
        protection = ProtectedCluster(
            nodes=file.nodes,
            group=file.group,
            losses=file.losses,
            hardware=_law(file.hardware, "hardware"),
            trainer=_law(file.trainer, "trainer"),
            snapshots=_law(file.snapshots, "snapshots"),
        )
    except InfeasibleError as error:
        raise ConfigurationError(f"{path.name}: {error}") from None
    return ReliabilityInput(
        protection=protection,
        threshold=file.threshold,
        persist_days=file.persist.cost_s / DAY_S,
        repair_days=file.repair.hours / 24,
        horizon_days=file.repair.horizon_days,
    )


def _law(table: FailureLawTable, name: str) -> FailureDistribution:
    if not SHAPES[0] <= table.shape <= SHAPES[1]:
        raise ConfigurationError(
            f"{table.shape} is not allowed",
            field=f"{name}.shape",
            remedy=f"write a number from {SHAPES[0]:g} to {SHAPES[1]:g}",
        )
    if (table.rate is None) == (table.mean_days is None):
        raise ConfigurationError(
            "give either rate or mean_days",
            field=name,
            remedy="rate is λ of exp(−λ·t^shape) with t in days, mean_days is the mean time to failure of a node",
        )
    if table.mean_days is None:
        return FailureDistribution(rate=table.rate or 0.0, shape=table.shape)
    require_positive(table.mean_days, f"{name}.mean_days")
    return FailureDistribution.of_mean(table.mean_days, table.shape)
