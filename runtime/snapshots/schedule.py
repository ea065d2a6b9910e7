"""The times at which a snapshot is copied: REFT's hierarchical asynchronous snapshotting (§4.1, Algorithm 1).

The copy of a step's state must end before the next step changes it. The paper copies in three layers:

1. in the stage's *bubbles*, in which the main thread waits for a neighbour or for the vote;
2. in parallel with computing, what does not fit into the bubbles (``SplitParameter``);
3. while gradients are summed, what is still left: only then does a device's link carry both.

The paper's third layer is communication within a node: that of tensor parallelism, which uses links of its
own. There is none here. Devices that share a stage split its rows, and communicate only in the sums of
gradients. These run over all owners of a bucket, also on other nodes, as one operation, so the part within
the node cannot be told apart. Therefore the third layer is the whole wait for sums, which traces call
``sync``.

Host memory has no separate link: while the host waits for sums, a core is idle, so this wait counts as a
bubble. The paper estimates all times beforehand, and the bubbles from
the shape of 1F1B. Here they are measured: the bandwidth of the copies so far, and the waits of the last
steps. The decision is made again after every unit from what is left, so that a step with shorter waits than
usual is noticed in time. What is left at the end is copied while the main thread waits: this is the stall.
The size of a unit depends on the bandwidth.
"""

from collections import deque
from dataclasses import dataclass, field

_STEPS = 8
"""Number of steps over which an estimate is averaged."""
_MARGIN = 0.8
"""Fraction of the estimated time that is relied on."""
_PAGE_BYTES = 4096
_LATE_S = 0.0005
"""Maximum delay in seconds caused by a unit of host memory that is being copied when a bubble ends."""
_LINK_S = 0.002
"""Seconds of a unit over a device's own link, which delays other copies but no computation."""
_LEAST_UNIT_BYTES, _FIRST_UNIT_BYTES = 1 << 20, 4 << 20
_MOST_UNIT_BYTES, _MOST_LINK_UNIT_BYTES = 16 << 20, 128 << 20
"""Limits of a unit's size. At 8 GB/s the default is right; smaller units are mostly overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step, of all its waits, and of its waits for sums of gradients."""

    step_s: float
    waits_s: float
    sync_s: float


@dataclass(slots=True)
class CopySchedule:
    """Estimates that decide when to copy. The owner's lock guards changes.

    :param has_own_link: copies come from a device, over a link that sums may use as well.
    """

    has_own_link: bool = False
    _steps: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _copied_bytes: float = 0.0
    _copied_s: float = 0.0

    def record_step(self, elapsed: StepTimes) -> None:
        """Add the times of a step to the estimates."""
        self._steps.append(elapsed)

    def record_copy(self, read_bytes: int, seconds: float) -> None:
        """Add the time of a unit's copy to the estimates."""
        self._copied_bytes += read_bytes
        self._copied_s += seconds

    def discount(self) -> None:
        """Halve the weight of the measurements so far, as another snapshot begins."""
        self._copied_bytes /= 2
        self._copied_s /= 2

    @property
    def bandwidth(self) -> float:
        """Bytes read per second of copying; 0 if not known yet."""
        return self._copied_bytes / self._copied_s if self._copied_s > 0 else 0.0

    @property
    def unit_bytes(self) -> int:
        """Number of bytes to read for one unit."""
        seconds, most = (_LINK_S, _MOST_LINK_UNIT_BYTES) if self.has_own_link else (_LATE_S, _MOST_UNIT_BYTES)
        wanted = self.bandwidth * seconds or _FIRST_UNIT_BYTES
        return int(min(max(wanted, _LEAST_UNIT_BYTES), most)) // _PAGE_BYTES * _PAGE_BYTES

    def is_bubble(self, *, waiting: bool, for_sums: bool) -> bool:
        """Return whether the main thread is in a bubble, from what it does."""
        return waiting and not (for_sums and self.has_own_link)

    def may_copy(self, left_bytes: int, so_far: StepTimes, *, bubble: bool) -> bool:
        """Return whether to copy the next unit now.

        :param so_far: times of the step in progress.
        """
        # Within a step, computing comes before the wait for sums, which gets what is left.
        return bubble or not self._fits_bubbles(left_bytes, so_far)

    def has_time(self, left_bytes: int, elapsed_s: float) -> bool:
        """Return whether what is left will be copied well before the step ends, at the rate so far.

        If so, digests are computed while copying, from bytes in the cache. Bytes of a device are not in the
        cache.

        :param elapsed_s: seconds since the step in progress began.
        """
        if self.has_own_link or not self._steps or not self.bandwidth:
            return False
        return left_bytes / self.bandwidth <= _MARGIN * (self._step_s() - elapsed_s)

    def _fits_bubbles(self, left_bytes: int, so_far: StepTimes) -> bool:
        """Return whether the remaining bubbles of the step suffice for what is left."""
        if not self._steps or not self.bandwidth:
            return False
        bubbles_s = sum(map(self._bubbles_s, self._steps)) / len(self._steps)
        to_come_s = min(bubbles_s - self._bubbles_s(so_far), self._step_s() - so_far.step_s)
        return left_bytes / self.bandwidth <= _MARGIN * to_come_s

    def _step_s(self) -> float:
        return sum(step.step_s for step in self._steps) / len(self._steps)

    def _bubbles_s(self, elapsed: StepTimes) -> float:
        return elapsed.waits_s - (elapsed.sync_s if self.has_own_link else 0.0)
