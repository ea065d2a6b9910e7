"""``varuna``: restart from checkpoints in a grid of pipelines (Athlur et al., "Varuna", EuroSys 2022).

Assumptions, from Oobleck's evaluation of Varuna (Jang et al., SOSP 2023, §2.2, §7):

* All pipelines have the same number of nodes, g, so only multiples of g nodes train; the others are idle. With
  published throughput g is fitted; otherwise pipelines have the fewest nodes that hold the model, because deeper
  ones spend more time filling and draining.
* A synchronous checkpoint after every 10 iterations stops training (§7.1).
* A failure of a node that trains starts the job again on the nodes that are left: new processes load the newest
  checkpoint, and all later iterations are computed again (§7.4.2). A further failure meanwhile starts this again.
* When nodes join that the grid can use, the job takes a checkpoint at the end of the iteration in flight and starts
  again with them ("job morphing").
* With a notice of preemption the job takes a checkpoint at the end of the iteration in flight, and starts again
  without the node, if the checkpoint is complete before the removal; otherwise it falls back as without notice
  (§7.3).

``varuna-no-checkpoints``: the same with checkpoints that stop nothing, after every 2 iterations (§7.4.3, Table 4).

With published throughput the stall, the restart and g are those of each model. Every node that is there when the job
starts counts as one that trains then, because the constants say how many nodes are idle, not which.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import BytesPerS, Parameters, Seconds
from ftd.replay.policies.departures import Departures
from ftd.replay.policies.pace import Pace, published_constants
from ftd.replay.policies.pauses import pauses
from ftd.replay.policy import Change, Checkpoints, Pause, Reaction, RecoveryPolicy, Running


class VarunaParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of checkpoints and restarts; published throughput brings its own, but for the interval of
    ``varuna-no-checkpoints``.
    """

    checkpoint_every_iterations: Annotated[int, msgspec.Meta(ge=1)]
    stalls: bool
    """Whether a checkpoint stops training."""
    checkpoint_s: Seconds
    """Time of a checkpoint apart from its bytes."""
    store_bytes_per_s: BytesPerS
    """Rate at which a checkpoint's bytes are stored."""
    start_s: Seconds
    """Time from a failure until all processes have started again."""
    load_bytes_per_s: BytesPerS
    """Rate at which a checkpoint's bytes are loaded."""


class VarunaPolicy(RecoveryPolicy):
    """Varuna's reactions to changes of the cluster."""

    name: ClassVar[str] = "varuna"

    def __init__(self, job: ReplayJob, parameters: Parameters, published: bool) -> None:
        """:raises PolicyExcluded: published throughput is asked for and the job has none."""
        times = parameters.section(self.name, VarunaParameters)
        constants = published_constants("varuna", job) if published else None
        self._pace = Pace(job=job, published=constants)
        every = times.checkpoint_every_iterations
        if constants is None:
            stall_s = times.checkpoint_s + job.state_bytes / times.store_bytes_per_s
            load_s = job.state_bytes / times.load_bytes_per_s
            self._restart = pauses(("restarting", times.start_s), ("moving", load_s))
        else:
            stall_s = constants.checkpoint_stall_s
            if times.stalls:
                every = constants.checkpoint_every
            self._restart = pauses(("restarting", constants.restart_s))
        self._stall_s = stall_s if times.stalls else 0.0
        self._checkpoints = Checkpoints(every_iterations=every, stall_s=self._stall_s) if every else None
        self._departures = Departures()
        self._training: frozenset[str] = frozenset()
        """Nodes whose failure stops the job."""
        self._running: Running | None = None
        """The way of running that was decided last; ``None``: the job waits for nodes."""
        self._begins_s = 0.0
        """Time at which the pauses before it begin."""

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``."""
        self._take(nodes, len(nodes))
        return Reaction(running=self._running)

    def change(self, change: Change) -> Reaction | None:
        """Return the reaction to failures, to nodes that join, and to nodes that announce their removal."""
        if change.leaving:
            return self._drain(change)
        members = self._departures.after(change)
        has_begun = change.at_s >= self._begins_s
        if not self._training.isdisjoint(members.failed) or (members.failed and not has_begun):
            self._take(members.usable, len(change.nodes))
            self._begins_s = change.at_s
            return Reaction(pauses=self._restarts(), running=self._running, undo="checkpoint")
        if self._running is None or self._uses_more(members.usable):
            return self._morph(members.usable, change)
        if not change.running or not has_begun:
            return None
        self._running = self._run(members.usable, len(change.nodes))
        return Reaction(running=self._running)

    def _drain(self, change: Change) -> Reaction | None:
        """Take a checkpoint ahead of a removal if there is time for it."""
        if not change.running or self._training.isdisjoint(change.leaving):
            return None
        if change.boundary_s + self._stall_s > change.notice_s:
            return None
        return self._morph(self._departures.leave(change), change)

    def _morph(self, nodes: Sequence[str], change: Change) -> Reaction | None:
        """Start again with other nodes, after a checkpoint if the job trains."""
        was_waiting = self._running is None
        self._take(nodes, len(change.nodes))
        if was_waiting and self._running is None:
            return None
        if not change.running:
            return Reaction(pauses=self._restarts(), running=self._running)
        self._begins_s = change.at_s + change.boundary_s
        return Reaction(
            pauses=(*pauses(("stalled", self._stall_s)), *self._restarts()),
            running=self._running,
            after_s=change.boundary_s,
            saved_s=self._stall_s,
        )

    def _restarts(self) -> tuple[Pause, ...]:
        return self._restart if self._running is not None else ()

    def _uses_more(self, nodes: Sequence[str]) -> bool:
        """Return whether the job would train faster on ``nodes`` than now."""
        iteration_s = self._pace.iteration_s(self._used(nodes))
        return (
            self._running is not None and iteration_s is not None and iteration_s < self._running.iteration_s
        )

    def _take(self, nodes: Sequence[str], present: int) -> None:
        self._running = self._run(nodes, present)
        self._training = frozenset(nodes[: self._used(nodes)]) if self._running is not None else frozenset()

    def _run(self, nodes: Sequence[str], present: int) -> Running | None:
        return self._pace.running(present, self._used(nodes), checkpoints=self._checkpoints)

    def _used(self, nodes: Sequence[str]) -> int:
        """Return how many nodes the job asks for: all with published throughput, which accounts for idle ones."""
        if self._pace.published is not None:
            return len(nodes)
        return len(nodes) - len(nodes) % self._pace.job.planner.n0


class VarunaWithoutCheckpointsPolicy(VarunaPolicy):
    """Varuna with checkpoints that cost nothing."""

    name: ClassVar[str] = "varuna-no-checkpoints"
