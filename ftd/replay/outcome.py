"""The result of one policy on one trace."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ftd.replay.policy import Category

RecoveryKind = Literal["rollback", "loss", "join", "other"]
"""Kind of a recovery: iterations that counted were lost; else nodes were lost; else nodes came; or none of these,
for example an announced removal.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive iterations that count, at one pace."""

    begin_s: float
    end_s: float
    samples: float


@dataclass(slots=True, kw_only=True)
class Recovery:
    """One interruption: from the first pause to the next time at which the job runs. Changes of the cluster that
    come before that belong to it.
    """

    at_s: float
    seconds: dict[Category, float] = field(default_factory=dict)
    """Length of the pauses by category. The time of waiting for nodes is not part of it."""
    lost: int = 0
    """Nodes that were removed."""
    added: int = 0
    rolled_back: bool = False
    """Whether iterations that counted were lost, apart from the one in flight."""
    redone_s: float = 0.0
    """Computing time that was lost."""

    @property
    def kind(self) -> RecoveryKind:
        """Return the worst of what happened."""
        if self.rolled_back:
            return "rollback"
        if self.lost:
            return "loss"
        return "join" if self.added else "other"

    @property
    def duration_s(self) -> float:
        """Return the length of all pauses."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one policy on one trace. ``seconds`` add up to ``wall_s``."""

    policy: str
    wall_s: float
    samples: float
    """Samples of the iterations that count."""
    iterations: int
    seconds: dict[Category, float]
    spans: tuple[Span, ...]
    recoveries: tuple[Recovery, ...]
    node_s: float
    """Seconds of all present nodes together, which is what they cost."""

    @property
    def samples_per_s(self) -> float:
        """Return the mean throughput."""
        return self.samples / self.wall_s if self.wall_s else 0.0

    def throughput(self, edges_s: Sequence[float]) -> list[float]:
        """Return the mean samples per second between consecutive ``edges_s`` (ascending), n − 1 values for n."""
        ends = [span.end_s for span in self.spans]
        found: list[float] = []
        for begin, end in pairwise(edges_s):
            total = 0.0
            for span in self.spans[bisect_right(ends, begin) :]:
                if span.begin_s >= end:
                    break
                shared_s = min(end, span.end_s) - max(begin, span.begin_s)
                if shared_s > 0:
                    total += span.samples * shared_s / (span.end_s - span.begin_s)
            found.append(total / (end - begin))
        return found
