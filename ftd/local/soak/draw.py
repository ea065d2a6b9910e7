"""What ``ftd chaos soak`` does to its cluster, drawn from a seed before anything happens.

The seed draws which faults come, in which order, how long each lasts and how much time lies between two.
Which node one strikes is drawn as a number that stands for a place among the nodes that can be struck then.
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
"""This part of the faults comes at most so long behind another one."""
LONGEST_S = 30.0
"""A pause between two faults is at most so long, however low the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """How often a fault comes, and within which bounds it is drawn."""

    do: SoakFaultName
    weight: int
    impairs: bool = False
    """The node may lose what it has of the state, or be left out of the plan: it counts against the losses
    that the job tolerates until it is back."""
    for_s: tuple[float, float] = (0.0, 0.0)
    """How long it lasts; of ``kill`` and ``term``, how long the node is away; of the coordinator and the
    broker likewise."""
    factor: tuple[float, float] = (1.0, 1.0)


KINDS: tuple[FaultKind, ...] = (
    FaultKind(do="kill", weight=6, impairs=True, for_s=(0.0, 6.0)),
    FaultKind(do="kill_trainer", weight=5, impairs=True),
    FaultKind(do="term", weight=2, impairs=True, for_s=(0.0, 4.0)),
    # Around the limits behind which a stopped process counts as lost: shorter ones must do nothing.
    FaultKind(do="stop", weight=3, impairs=True, for_s=(0.2, 4.0)),
    FaultKind(do="stop_trainer", weight=3, impairs=True, for_s=(0.1, 3.0)),
    FaultKind(do="hang", weight=2, impairs=True, for_s=(0.3, 6.0)),
    FaultKind(do="raise", weight=2, impairs=True),
    FaultKind(do="slow", weight=3, for_s=(3.0, 15.0), factor=(1.5, 5.0)),
    FaultKind(do="disconnect", weight=3, impairs=True, for_s=(0.2, 5.0)),
    # How much is lost; as much comes twice, and the rest is late in proportion.
    FaultKind(do="lossy", weight=2, impairs=True, for_s=(1.0, 8.0), factor=(0.02, 0.3)),
    FaultKind(do="flip", weight=1),
    FaultKind(do="fill_memory", weight=2, for_s=(1.0, 8.0)),
    FaultKind(do="kill_coordinator", weight=3, for_s=(0.0, 4.0)),
    # Around the limit behind which a standby takes over.
    FaultKind(do="stop_coordinator", weight=2, for_s=(0.3, 6.0)),
    FaultKind(do="kill_broker", weight=2, for_s=(0.0, 4.0)),
)

IMPAIRING: frozenset[str] = frozenset(kind.do for kind in KINDS if kind.impairs)
"""The faults that count against the losses that the job tolerates."""
CENTRAL: frozenset[str] = frozenset({"kill_coordinator", "stop_coordinator", "kill_broker"})
"""Those that strike no node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFault:
    """One fault, as drawn."""

    number: int
    """From 1 on."""
    at_s: float
    """Since the faults begin; it comes later where the losses that the job tolerates are reached."""
    do: SoakFaultName
    place: float
    """In [0, 1): where in the list of nodes that can be struck."""
    for_s: float
    factor: float

    def node_of(self, nodes: list[str]) -> str | None:
        """The one among these; ``None``: it strikes no node, or there is none."""
        if self.do in CENTRAL or not nodes:
            return None
        return sorted(nodes)[int(self.place * len(nodes))]


def draw(seed: int, *, rate_per_min: float, until_s: float, memory: bool = False) -> tuple[DrawnFault, ...]:
    """The faults of a soak that lasts ``until_s``, in order: ``rate_per_min`` on average.

    Some come close behind another, into the recovery from it. A longer soak of the same seed and rate begins
    with the same faults.

    :param memory: the memory of snapshots may be filled: it is not the machine's own.
    """
    rng = Random(seed)
    kinds = [kind for kind in KINDS if memory or kind.do != "fill_memory"]
    strikes: list[DrawnFault] = []
    at_s = 0.0
    while True:
        close = bool(strikes) and rng.random() < CLOSE_SHARE
        far_s = min(rng.expovariate(rate_per_min / 60.0 * (1 - CLOSE_SHARE)), LONGEST_S)
        at_s += rng.uniform(0.0, CLOSE_S) if close else far_s
        # Close behind another one mostly come those that the losses tolerated do not hold back.
        weights = [kind.weight * (4 if close and not kind.impairs else 1) for kind in kinds]
        [kind] = rng.choices(kinds, weights)
        strike = DrawnFault(
            number=len(strikes) + 1,
            at_s=round(at_s, 3),
            do=kind.do,
            place=rng.random(),
            for_s=round(rng.uniform(*kind.for_s), 3),
            factor=round(rng.uniform(*kind.factor), 2),
        )
        if at_s >= until_s:
            return tuple(strikes)
        strikes.append(strike)
