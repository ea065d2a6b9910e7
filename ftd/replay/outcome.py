"""The result of one policy on one trace."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ftd.replay.policy import Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive iterations that count, at one pace."""

    begin_s: float
    end_s: float
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One interruption: from a change of the cluster to the next iteration's start."""

    at_s: float
    seconds: dict[Category, float]
    lost: int
    """Nodes that were removed."""
    redone_s: float
    """Computing time that was lost."""


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
