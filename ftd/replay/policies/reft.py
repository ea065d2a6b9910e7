"""``reft``: restart from memory (Wang et al., "Towards Fault-Tolerant Hybrid-Parallel Training at Scale with Reliable
and Efficient In-memory Checkpointing", REFT).

Assumptions:

* Pipelines have the fewest nodes that hold the model, in a grid (§4, Figure 5); nodes beyond a multiple are idle. The
  nodes of one stage in all pipelines are a sharding group, whose snapshot they divide.
* A snapshot after every iteration (§5: "iteration-level saving") stops training for a small share of it (§7.2 to §7.5).
* Each shard is protected by a copy (ARC), by parity (AEC), or, for optimizer state that is sharded, by recomputation on
  the host (AOR); all of them survive one lost node of each sharding group (§4.2), and two methods together survive two.
  A sharding group of one node has no redundancy.
* After a failure all processes start again on the nodes that are left, by the elastic agent of PyTorch (§4.4), load
  their shards from host memory, and gather or decode what is missing (§4.3). Only the iteration in flight is lost.
* If more nodes of a sharding group are lost than the protection survives, the job loads the persistent checkpoint,
  which is written from host memory now and then (§4.4). Until a restart is complete, nodes hold what they held before.
* Nodes that join and complete a pipeline restart the job, from memory, at once.
* Notices of preemption are not used. With too few nodes for a pipeline the job waits.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from ftd.errors import ConfigurationError
from ftd.replay.job import ReplayJob
from ftd.replay.parameters import BytesPerS, Interval, Parameters, Seconds
from ftd.replay.policies.pace import Pace
from ftd.replay.policies.pauses import pauses, total_s
from ftd.replay.policy import Change, Checkpoints, Reaction, RecoveryPolicy, Running
from planner.intervals import WRITE_PERIODS

Protection = Literal["ARC", "AEC", "AOR"]

SHORTEST_INTERVAL_S = 60.0
"""Lower bound of the time between persistent checkpoints that is chosen from the time to write one."""


class ReftParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of snapshots in memory and of restarts."""

    protection: Annotated[tuple[Protection, ...], msgspec.Meta(min_length=1)]
    """Methods of protection, each of which survives one lost node of a sharding group more."""
    snapshot_share: dict[Protection, Annotated[float, msgspec.Meta(ge=0)]]
    """Time for which a snapshot with each method stops training, as a share of an iteration."""
    detect_s: Seconds
    """Time until the loss of a node is known."""
    start_s: Seconds
    """Time to start all processes again."""
    memory_bytes_per_s: dict[Protection, BytesPerS]
    """Rate at which the whole state is loaded from host memory, with decoding."""
    load_bytes_per_s: BytesPerS
    """Rate at which the persistent checkpoint is loaded."""
    store_bytes_per_s: BytesPerS
    """Rate at which the persistent checkpoint is written."""
    persist_every_s: Interval | Literal["auto"]
    """Time between two persistent checkpoints, which stop nothing; ``auto``: storage is busy for a tenth of it."""


class ReftPolicy(RecoveryPolicy):
    """Restarts from snapshots in the memory of hosts."""

    name: ClassVar[str] = "reft"

    def __init__(self, job: ReplayJob, parameters: Parameters) -> None:
        """:raises ConfigurationError: a method of the protection has no costs."""
        times = parameters.section(self.name, ReftParameters)
        self._pace, self._stages = Pace(job=job), job.planner.n0
        methods = times.protection
        for key, by_method in (
            ("snapshot_share", times.snapshot_share),
            ("memory_bytes_per_s", times.memory_bytes_per_s),
        ):
            lacking = [method for method in methods if method not in by_method]
            if lacking:
                raise ConfigurationError(
                    f"[reft]: {key} lacks {', '.join(lacking)}, which protection names", field="--parameters"
                )
        if len(set(methods)) < len(methods):
            raise ConfigurationError("[reft]: protection names a method twice", field="--parameters")
        self._survives = len(methods)
        self._share = sum(times.snapshot_share[method] for method in methods)
        self._detect = pauses(("detecting", times.detect_s))
        rates = [times.memory_bytes_per_s[method] for method in methods]
        load_s = job.state_bytes / times.load_bytes_per_s
        self._from_memory = pauses(("restarting", times.start_s), ("moving", job.state_bytes / min(rates)))
        self._from_storage = pauses(("restarting", times.start_s), ("moving", load_s))
        self._store_s = job.state_bytes / times.store_bytes_per_s
        self._running: Running | None = None
        """The way of running that was decided last; ``None``: the job waits for nodes."""
        self._held: tuple[str, ...] = ()
        """Nodes of the grid whose snapshots are complete: the node of stage s in pipeline p has index p·n₀ + s."""
        self._grid: tuple[str, ...] = ()
        """Nodes of the grid that replaces ``_held`` at ``_complete_s``."""
        self._complete_s = 0.0
        self._gone: set[str] = set()
        """Nodes of ``_held`` that were lost."""
        self._persisted: list[tuple[float, int]] = [(0.0, 0)]
        """Persistent checkpoints: the time from which each can be used, and its iterations."""
        self._persist_every_s = (
            max(SHORTEST_INTERVAL_S, WRITE_PERIODS * self._store_s)
            if times.persist_every_s == "auto"
            else times.persist_every_s
        )
        self.wake_at_s = self._persist_every_s

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``."""
        self._lay_out(nodes)
        self._held = self._grid
        return Reaction(running=self._running)

    def change(self, change: Change) -> Reaction | None:
        """Return the restart after a failure or a join; write a persistent checkpoint when it is time."""
        if self._grid and change.at_s >= self._complete_s and self._held is not self._grid:
            self._held, self._gone = self._grid, set()
        if self.wake_at_s is not None and change.at_s >= self.wake_at_s:
            self._persist(change)
        if not change.added and not change.removed:
            return None
        self._gone.update(change.removed)
        failed = not set(self._grid).isdisjoint(change.removed)
        loses = bool(self._held) and self._is_lost()
        if failed or loses or len(change.nodes) // self._stages > len(self._grid) // self._stages:
            return self._restart(change, failed=failed, loses=loses)
        if not change.running:
            return None
        self._running = self._run(len(change.nodes))
        return Reaction(running=self._running)

    def _restart(self, change: Change, *, failed: bool, loses: bool) -> Reaction | None:
        """Load the snapshot if the present nodes have it, else the persistent checkpoint.

        :param loses: whether the change loses the snapshot.
        """
        if loses:
            self._held = ()
        keep = self._newest_persisted(change.at_s) if loses else None
        self._lay_out(change.nodes)
        detect = self._detect if failed else ()
        if self._running is None:
            return Reaction(pauses=detect, running=None, undo="checkpoint", keep_iterations=keep)
        steps = (*detect, *(self._from_memory if self._held else self._from_storage))
        # The first snapshot of the new grid completes its redundancy.
        self._complete_s = change.at_s + total_s(steps) + self._running.iteration_s
        return Reaction(pauses=steps, running=self._running, undo="checkpoint", keep_iterations=keep)

    def _is_lost(self) -> bool:
        """Return whether a sharding group lost more nodes than its protection survives."""
        groups = [self._held[stage :: self._stages] for stage in range(self._stages)]
        return any(
            len(self._gone.intersection(group)) > min(self._survives, len(group) - 1) for group in groups
        )

    def _persist(self, change: Change) -> None:
        self._persisted.append((change.at_s + self._store_s, change.iterations))
        self.wake_at_s = change.at_s + self._persist_every_s

    def _newest_persisted(self, at_s: float) -> int:
        """Return the iterations of the newest persistent checkpoint that is complete."""
        self._persisted = [each for each in self._persisted if each[0] <= at_s][-1:]
        return self._persisted[0][1]

    def _lay_out(self, nodes: Sequence[str]) -> None:
        """Lay a grid of as many pipelines as ``nodes`` suffice for."""
        self._grid = tuple(nodes[: len(nodes) - len(nodes) % self._stages])
        self._running = self._run(len(nodes))
        if self._running is None:
            self._grid = ()

    def _run(self, present: int) -> Running | None:
        iteration_s = self._pace.iteration_s(len(self._grid))
        if iteration_s is None:
            return None
        snapshots = Checkpoints(every_iterations=1, stall_s=self._share * iteration_s)
        return self._pace.running(present, len(self._grid), checkpoints=snapshots)
