"""The faults of a soak, drawn from a seed before anything happens.

The seed determines which faults come, in which order, how long each lasts and how much time lies between
two. The target node is drawn as a number in [0, 1) that selects one of the nodes that are available at that
moment.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

SoakFaultName = Literal[
    "kill", "kill_trainer", "term", "stop", "stop_trainer", "hang", "raise", "slow", "disconnect", "lossy",
    "flip", "fill_memory", "kill_coordinator", "stop_coordinator",
    "kill_broker",
]  # fmt: skip

CLOSE_SHARE, CLOSE_S = 0.3, 0.6
"""The share of faults that follow another one closely, and the longest time between the two."""
LONGEST_S = 30.0
"""The longest pause between two faults, however low the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A fault that can be drawn: its weight, and the bounds within which it is drawn."""

    do: SoakFaultName
    weight: int
    impairs: bool = False
    """Whether the node may lose its state or be left out of the plan. If so, it counts against the losses that
    the job tolerates until it has recovered.
    """
    for_s: tuple[float, float] = (0.0, 0.0)
    """Bounds of the duration. For ``kill`` and ``term``, and for faults of the coordinator and the broker,
    this is how long the process is away.
    """
    factor: tuple[float, float] = (1.0, 1.0)


KINDS: tuple[FaultKind, ...] = (
    FaultKind(do="kill", weight=6, impairs=True, for_s=(0.0, 6.0)),
    FaultKind(do="kill_trainer", weight=5, impairs=True),
    FaultKind(do="term", weight=2, impairs=True, for_s=(0.0, 4.0)),
    # Around the timeouts after which a stopped process counts as lost; shorter stops must have no effect.
    FaultKind(do="stop", weight=3, impairs=True, for_s=(0.2, 4.0)),
    FaultKind(do="stop_trainer", weight=3, impairs=True, for_s=(0.1, 3.0)),
    FaultKind(do="hang", weight=2, impairs=True, for_s=(0.3, 6.0)),
    FaultKind(do="raise", weight=2, impairs=True),
    FaultKind(do="slow", weight=3, for_s=(3.0, 15.0), factor=(1.5, 5.0)),
    FaultKind(do="disconnect", weight=3, impairs=True, for_s=(0.2, 5.0)),
    # ``factor`` is the share of messages that is lost. As many are duplicated, and delays grow in
    # proportion.
    FaultKind(do="lossy", weight=2, impairs=True, for_s=(1.0, 8.0), factor=(0.02, 0.3)),
    FaultKind(do="flip", weight=1),
    FaultKind(do="fill_memory", weight=2, for_s=(1.0, 8.0)),
    FaultKind(do="kill_coordinator", weight=3, for_s=(0.0, 4.0)),
    # Around the timeout after which a standby takes over.
    FaultKind(do="stop_coordinator", weight=2, for_s=(0.3, 6.0)),
    FaultKind(do="kill_broker", weight=2, for_s=(0.0, 4.0)),
)

IMPAIRING: frozenset[str] = frozenset(kind.do for kind in KINDS if kind.impairs)
"""The faults that count against the losses that the job tolerates."""
CENTRAL_FAULTS: frozenset[str] = frozenset({"kill_coordinator", "stop_coordinator", "kill_broker"})
"""The faults that do not target a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFault:
    """One fault as drawn."""

    number: int
    """The number of the fault, from 1."""
    at_s: float
    """Seconds since the first fault could come. The fault is delayed while the losses that the job tolerates
    are reached.
    """
    do: SoakFaultName
    position: float
    """A number in [0, 1) that selects one of the available nodes."""
    for_s: float
    factor: float

    def choose_node(self, nodes: list[str]) -> str | None:
        """Return the targeted one of these nodes, or ``None`` if the fault targets no node or the list is
        empty.
        """
        if self.do in CENTRAL_FAULTS or not nodes:
            return None
        return sorted(nodes)[int(self.position * len(nodes))]


def draw_faults(
    seed: int, *, rate_per_min: float, until_s: float, memory: bool = False
) -> tuple[DrawnFault, ...]:
    """Return the faults of a soak that lasts ``until_s``, in order: ``rate_per_min`` on average.

    Some closely follow another one, so that they hit the recovery from it. A longer soak with the same seed
    and rate begins with the same faults.

    :param memory: whether the memory for snapshots may be filled, that is, it is not the machine's own.
    """
    rng = Random(seed)
    kinds = [kind for kind in KINDS if memory or kind.do != "fill_memory"]
    faults: list[DrawnFault] = []
    at_s = 0.0
    while True:
        close = bool(faults) and rng.random() < CLOSE_SHARE
        far_s = min(rng.expovariate(rate_per_min / 60.0 * (1 - CLOSE_SHARE)), LONGEST_S)
        at_s += rng.uniform(0.0, CLOSE_S) if close else far_s
        # Faults that follow another one closely are mostly those that need not wait for nodes to recover.
        weights = [kind.weight * (4 if close and not kind.impairs else 1) for kind in kinds]
        [kind] = rng.choices(kinds, weights)
        fault = DrawnFault(
            number=len(faults) + 1,
            at_s=round(at_s, 3),
            do=kind.do,
            position=rng.random(),
            for_s=round(rng.uniform(*kind.for_s), 3),
            factor=round(rng.uniform(*kind.factor), 2),
        )
        if at_s >= until_s:
            return tuple(faults)
        faults.append(fault)
