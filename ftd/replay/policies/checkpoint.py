"""``checkpoint``: restart from disk, as users of ``torchrun`` with elastic nodes have it.

Assumptions:

* A lost node is noticed when its agent misses its keep-alive messages. Then all processes start again on the nodes
  that are present, and load the newest checkpoint; later iterations are computed again. A further change meanwhile
  starts this again. Any number of nodes can load a checkpoint (``torch.distributed.checkpoint`` reshards it), and all
  of them train.
* When nodes join, ``torchrun`` restarts all processes at once, without a checkpoint before it. With ``joins =
  "next_restart"`` they are idle until a failure.
* The interval between checkpoints is fixed, or the one that loses least by Daly's model (Daly, "A higher order estimate
  of the optimum checkpoint interval for restart dumps", 2006; ``planner.intervals``): for a given mean time between
  failures, or for the one learned so far, which begins with one failure an hour. The learned one takes effect at
  restarts.
* An asynchronous checkpoint stops training for a copy to host memory, and can be used when it is written; the next
  one waits for that, and with ``every_s = "auto"`` keeps storage busy for a tenth of the time at most, as ftd does. A
  synchronous one stops training until it is written.
* Notices of preemption are not used. With too few nodes for the model the job waits.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import BytesPerS, Interval, Parameters, Seconds
from ftd.replay.policies.pace import Pace
from ftd.replay.policies.pauses import pauses
from ftd.replay.policy import Change, Checkpoints, Reaction, RecoveryPolicy, Running
from planner.changes.tradeoff import DEFAULT_HORIZON_S
from planner.intervals import WRITE_PERIODS, IntervalCost, best_interval

LONGEST_INTERVAL_S = 86_400.0
"""Upper bound of a learned interval: few users let more than a day pass without a checkpoint."""


class CheckpointParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of checkpoints and restarts."""

    detect_s: Seconds
    """Time until the loss of a node is known."""
    start_s: Seconds
    """Time to start all processes again."""
    load_bytes_per_s: BytesPerS
    """Rate at which the state is loaded from storage."""
    store_bytes_per_s: BytesPerS
    """Rate at which the state is written to storage."""
    asynchronous: bool
    """Whether training goes on while a checkpoint is written."""
    copy_bytes_per_s: BytesPerS
    """Rate at which a node copies its share of the state for an asynchronous checkpoint."""
    every_s: Interval | Literal["auto"]
    """Time between checkpoints; ``auto``: the interval that loses least."""
    failure_every_s: Interval | Literal["learned"]
    """Mean time between failures from which ``auto`` follows."""
    joins: Literal["at_once", "next_restart"]
    """Moment at which nodes that join are taken in."""


class CheckpointPolicy(RecoveryPolicy):
    """Restarts from the newest checkpoint."""

    name: ClassVar[str] = "checkpoint"

    def __init__(self, job: ReplayJob, parameters: Parameters) -> None:
        times = parameters.section(self.name, CheckpointParameters)
        self._pace, self._times = Pace(job=job), times
        self._write_s = job.state_bytes / times.store_bytes_per_s
        share_bytes = job.state_bytes / job.planner.n0
        self._stall_s = share_bytes / times.copy_bytes_per_s if times.asynchronous else self._write_s
        self._detect = pauses(("detecting", times.detect_s))
        load_s = job.state_bytes / times.load_bytes_per_s
        self._restart = pauses(("restarting", times.start_s), ("moving", load_s))
        self._failures = 0
        self._training: frozenset[str] = frozenset()
        """Nodes that train, or are to train after the pauses."""
        self._every_iterations = 0
        """Iterations between two checkpoints, from the last start on."""
        self._running: Running | None = None

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``."""
        return Reaction(running=self._take(nodes, 0.0))

    def change(self, change: Change) -> Reaction | None:
        """Return the restart after a failure or a join."""
        failed = not self._training.isdisjoint(change.removed)
        self._failures += bool(change.removed)
        if failed:
            running = self._take(change.nodes, change.at_s)
            steps = (*self._detect, *(self._restart if running is not None else ()))
            return Reaction(pauses=steps, running=running, undo="checkpoint")
        if self._running is None:
            running = self._take(change.nodes, change.at_s)
            return Reaction(pauses=self._restart, running=running) if running is not None else None
        if not change.added and not change.removed:
            return None
        if change.added and self._times.joins == "at_once":
            running = self._take(change.nodes, change.at_s)
            return Reaction(pauses=self._restart, running=running, undo="checkpoint")
        if not change.running:
            return None
        self._running = self._run(len(change.nodes))
        return Reaction(running=self._running)

    def _take(self, nodes: Sequence[str], at_s: float) -> Running | None:
        """Let all nodes train from the next start on, if they suffice."""
        self._training = frozenset(nodes)
        iteration_s = self._pace.iteration_s(len(nodes))
        if iteration_s is None:
            self._training, self._running = frozenset(), None
            return None
        self._every_iterations = self._every(iteration_s, at_s)
        self._running = self._run(len(nodes))
        return self._running

    def _run(self, present: int) -> Running | None:
        """Return how the nodes of ``_training`` run."""
        checkpoints = Checkpoints(
            every_iterations=self._every_iterations,
            stall_s=self._stall_s,
            write_s=self._write_s if self._times.asynchronous else 0.0,
        )
        return self._pace.running(present, len(self._training), checkpoints=checkpoints)

    def _every(self, iteration_s: float, at_s: float) -> int:
        """Return the iterations between two checkpoints."""
        times, write_s = self._times, self._write_s if self._times.asynchronous else 0.0
        if times.every_s != "auto":
            return max(1, math.ceil(write_s / iteration_s), round(times.every_s / iteration_s))
        horizon_s = times.failure_every_s
        if horizon_s == "learned":
            horizon_s = (at_s + DEFAULT_HORIZON_S) / (self._failures + 1)
        cost = IntervalCost(step_s=iteration_s, cost_s=self._stall_s, horizon_s=horizon_s)
        best = best_interval(cost, max(1, int(LONGEST_INTERVAL_S / iteration_s)))
        return max(best, math.ceil(WRITE_PERIODS * write_s / iteration_s))
