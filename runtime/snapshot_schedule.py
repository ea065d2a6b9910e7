"""When the bytes of a snapshot are copied: REFT's hierarchical asynchronous snapshotting (§4.1, Algorithm 1).

The copy of a step's state must end before the next step changes it. The paper splits it into layers:

1. in the stage's *bubbles*, which are here all waits of the main thread for peers (``Pace.idle``): between
   microbatches, for the last gradients, for the vote;
2. beside computing, what does not fit into the bubbles (``SplitParameter``);
3. beside communication on other wires. There is no such layer here: a main thread that waits for
   communication is in layer 1 already, and communication beside computing is not told from computing.

The paper estimates both times beforehand, the bubbles from the shape of 1F1B. Here both are measured: the
bandwidth of the copies so far, and the bubbles of the last steps as they were. And it is decided anew behind
every unit, by what is left, so that a step that waits less than usual is noticed in time. What is left in the
end is copied while the main thread stands still: the stall.
"""

from collections import deque
from dataclasses import dataclass, field

_STEPS = 8
"""Steps that an estimate is the mean of."""
_MARGIN = 0.8
"""Part of the estimated time that is relied on."""


@dataclass(slots=True)
class Schedule:
    """Estimates. Written under the lock of whoever owns it."""

    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _copied_bytes: float = 0.0
    _copied_s: float = 0.0

    def note_step(self, step_s: float, bubble_s: float) -> None:
        self._steps.append((step_s, bubble_s))

    def note_copy(self, read_bytes: int, seconds: float) -> None:
        self._copied_bytes += read_bytes
        self._copied_s += seconds

    def age(self) -> None:
        """Another snapshot begins: what was measured for older ones counts half."""
        self._copied_bytes /= 2
        self._copied_s /= 2

    @property
    def bandwidth(self) -> float:
        """Bytes read per second of copying; 0: not known yet."""
        return self._copied_bytes / self._copied_s if self._copied_s > 0 else 0.0

    def can_wait(self, left_bytes: int, gone_s: float, idle_s: float) -> bool:
        """The bubbles to come suffice for what is left: it need not be copied beside computing.

        :param gone_s: since the step began.
        :param idle_s: of that, spent in bubbles.
        """
        if not self._steps or not self.bandwidth:
            return False
        step_s = sum(step for step, _ in self._steps) / len(self._steps)
        bubble_s = sum(bubble for _, bubble in self._steps) / len(self._steps)
        return left_bytes / self.bandwidth <= _MARGIN * min(bubble_s - idle_s, step_s - gone_s)
