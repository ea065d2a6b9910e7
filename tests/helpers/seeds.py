"""Seeds of the simulator: the search for those that find a planted bug, and overrides that several tests use."""

from collections.abc import Sequence

from ftd.faults.sim import faults
from ftd.faults.sim.simulation import SeedOverrides
from ftd.faults.sim.simulation_run import run_seed

SEEDS = 200
"""Number of seeds that have to find a bug."""

RESTORED_BROKER = SeedOverrides(
    coordinators=2,
    rare_faults=False,
    upgrades=False,
    triggered_faults=(
        ("GenerationStarted", faults.restore_saved_broker, 0),
        ("NodeLost", faults.crash_node, 0),
        ("RecoveryCompleted", faults.crash_node, 0),
        ("RecoveryCompleted", faults.restore_saved_broker, 0),
        ("Quiesced", faults.crash_node, 1),
    ),
)
"""A broker comes back with what it once saved, and the leader is away."""


def found(
    expected: str, seeds: Sequence[int] = range(SEEDS), overrides: SeedOverrides | None = None
) -> tuple[int, str]:
    """Return the first seed that finds the bug, and the violation.

    :param seeds: by default all from 0 on; ``seeds_from`` skips many that are known to find nothing.
    """
    for seed in seeds:
        violation = run_seed(seed, overrides=overrides).violation
        if violation is not None and expected in violation:
            return seed, violation
    raise AssertionError(f"{len(seeds)} seeds did not find the planted bug ({expected!r})")


def seeds_from(first: int) -> range:
    return range(first, first + SEEDS)
