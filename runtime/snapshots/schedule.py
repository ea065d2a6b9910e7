"""When the bytes of a snapshot are copied: REFT's hierarchical asynchronous snapshotting (§4.1, Algorithm 1).

The copy of a step's state must end before the next step changes it. The paper splits it into layers:

1. in the stage's *bubbles*: waits of the main thread for a neighbour, or for the vote (``Pace.idle``);
2. beside computing, what does not fit into the bubbles (``SplitParameter``);
3. while gradients are summed, what was left by both: only then does a device's link carry two things.

The paper's third layer is communication within a node: that of tensor parallelism, which keeps to links of
its own. There is none here. Devices that split a stage split its rows and meet only in the sums of gradients,
which run over all owners of a bucket, other nodes' too, as one operation: what of it is within the node
cannot be told apart. So the third layer is the whole wait for sums, and the trace calls it ``sync``.

Host memory has no link of its own to spare: there a wait for sums is a core that idles, so it counts as a
bubble. (With a device this has never run.) The paper estimates all times beforehand, the bubbles from the
shape of 1F1B. Here they are measured: the bandwidth of the copies so far, and the waits of the last steps as
they were. It is decided anew behind every unit, by what is left, so that a step that waits less than usual
is noticed in time. What is left in the end is copied while the main thread stands still: the stall. The size
of a unit follows the bandwidth.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, assert_never

Period = Literal["bubble", "computing", "communication"]
"""Of a step, as in the three layers."""

_STEPS = 8
"""Steps that an estimate is the mean of."""
_MARGIN = 0.8
"""Part of the estimated time that is relied on."""
_PAGE_BYTES = 4096
_LATE_S = 0.0005
"""What is under way when a bubble ends is late by so much at most."""
_LEAST_UNIT_BYTES, _FIRST_UNIT_BYTES, _MOST_UNIT_BYTES = 1 << 20, 4 << 20, 16 << 20
"""At 8 GB/s the first is right; smaller ones are all overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds: of a step, of all its waits, and of those of them that were for sums of gradients."""

    step_s: float
    waits_s: float
    sums_s: float


@dataclass(slots=True)
class CopySchedule:
    """Estimates. Written under the lock of whoever owns it.

    :param has_own_link: copies come from a device, over a link that sums may use, too.
    """

    has_own_link: bool = False
    _steps: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _copied_bytes: float = 0.0
    _copied_s: float = 0.0

    def record_step(self, elapsed: StepTimes) -> None:
        self._steps.append(elapsed)

    def record_copy(self, read_bytes: int, seconds: float) -> None:
        self._copied_bytes += read_bytes
        self._copied_s += seconds

    def discount(self) -> None:
        """Another snapshot begins: what was measured for older ones counts half."""
        self._copied_bytes /= 2
        self._copied_s /= 2

    @property
    def bandwidth(self) -> float:
        """Bytes read per second of copying; 0: not known yet."""
        return self._copied_bytes / self._copied_s if self._copied_s > 0 else 0.0

    @property
    def unit_bytes(self) -> int:
        """To be read for one unit."""
        wanted = self.bandwidth * _LATE_S or _FIRST_UNIT_BYTES
        return int(min(max(wanted, _LEAST_UNIT_BYTES), _MOST_UNIT_BYTES)) // _PAGE_BYTES * _PAGE_BYTES

    def period(self, *, waiting: bool, for_sums: bool) -> Period:
        """Which one it is now, by what the main thread does."""
        if not waiting:
            return "computing"
        return "communication" if for_sums and self.has_own_link else "bubble"

    def may_copy(self, period: Period, left_bytes: int, so_far: StepTimes) -> bool:
        """Whether the next unit is made now.

        :param so_far: of the step that is under way.
        """
        match period:
            case "bubble":
                return True
            case "computing" | "communication":
                # Computing comes before the sums of a step are waited for: these get what it left.
                return not self._fits_bubbles(left_bytes, so_far)
            case _:
                assert_never(period)

    def has_time(self, left_bytes: int, elapsed_s: float) -> bool:
        """Whether what is left will be copied well before the step ends, at the rate so far: then digests are
        made beside copying, of bytes that are in the cache. A device's are not.

        :param elapsed_s: of the step that is under way.
        """
        if self.has_own_link or not self._steps or not self.bandwidth:
            return False
        return left_bytes / self.bandwidth <= _MARGIN * (self._step_s() - elapsed_s)

    def _fits_bubbles(self, left_bytes: int, so_far: StepTimes) -> bool:
        """The bubbles to come suffice for what is left."""
        if not self._steps or not self.bandwidth:
            return False
        bubbles_s = sum(map(self._bubbles_s, self._steps)) / len(self._steps)
        to_come_s = min(bubbles_s - self._bubbles_s(so_far), self._step_s() - so_far.step_s)
        return left_bytes / self.bandwidth <= _MARGIN * to_come_s

    def _step_s(self) -> float:
        return sum(step.step_s for step in self._steps) / len(self._steps)

    def _bubbles_s(self, elapsed: StepTimes) -> float:
        return elapsed.waits_s - (elapsed.sums_s if self.has_own_link else 0.0)
