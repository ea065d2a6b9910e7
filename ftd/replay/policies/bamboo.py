"""``bamboo``: redundant computation (Thorpe et al., "Bamboo", NSDI 2023).

Assumptions, from Oobleck's evaluation of Bamboo (Jang et al., SOSP 2023, §2.2, §7) and the simulator in its artifact:

* All pipelines have the same number of stages, one on each node; the other nodes are idle. Each node also holds the
  state of the next stage (that of the last stage is the first), and computes its forward pass all the time. So it
  needs twice the memory, and it uses no activation checkpointing (§7.1, footnote 2). A job is excluded if a
  pipeline has no next stage, or if its doubled state does not fit with microbatches of one sample. Pipelines have the
  fewest stages with which it fits, at least two; with published throughput, those of the artifact.
* Redundant computation takes a share of the throughput even without failures; published throughput contains it.
* When a node fails, the one before it computes both stages. Nothing is lost, but until its end the iteration in
  flight is as slow as that node: forward and backward passes of two stages, where it took both passes of one and the
  forward pass of the other. Then the nodes form new pipelines, idle ones included, and copy state.
* If a stage and the one before it have both failed, the state is lost, and the job starts again from a checkpoint.
  With published throughput it loses the iteration in flight only, as in the artifact.
* A failure during a reconfiguration starts it again; until its end, state is where it was before.
* Nodes that join are idle until they complete a pipeline, for which the nodes reconfigure at the end of an iteration.
* With a notice of preemption (§7.3) nodes reconfigure at the last end of an iteration before the removal.
* With too few nodes for a pipeline the job waits; the nodes that are left keep their state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import msgspec

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import BytesPerS, Parameters, Seconds
from ftd.replay.policies.departures import Departures, last_boundary_s
from ftd.replay.policies.pace import Pace, published_constants
from ftd.replay.policies.pauses import pauses, total_s
from ftd.replay.policy import Change, Checkpoints, PolicyExcluded, Reaction, RecoveryPolicy, Running, Undo
from planner.errors import BatchError, InfeasibleError
from planner.planner import Planner
from planner.values import LayerProfile

Pipelines = tuple[tuple[str, ...], ...]
"""Node of each stage of each pipeline."""


class BambooParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of redundant computation; published throughput brings its own overhead and reconfiguration."""

    overhead: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    """Share of the throughput that redundant computation takes without failures."""
    takeover_slowdown: Annotated[float, msgspec.Meta(ge=1)]
    """Factor of an iteration's time while a node computes two stages."""
    detect_s: Seconds
    """Time until a failure is known to the node before it."""
    reconfigure_s: Seconds
    """Time of a reconfiguration apart from the state."""
    state_bytes_per_s: BytesPerS
    """Rate at which the whole state is copied in a reconfiguration, or loaded from a checkpoint."""
    restart_s: Seconds
    """Time to start the job again after a loss of state, apart from the loading."""
    checkpoint_every_s: Seconds
    """Time between two checkpoints, which stop nothing."""
    published_stages: Annotated[int, msgspec.Meta(ge=2)]
    """Stages of a pipeline with published throughput."""


def smallest_pipeline(job: ReplayJob) -> int:
    """Return the fewest nodes, at least two, that hold the job's state twice.

    :raises PolicyExcluded: there is no next stage, or the memory does not suffice.
    """
    if len(job.profile.layers) < 2:
        raise PolicyExcluded(
            "the model has one layer, so no stage has a next one that its node could compute"
        )
    # Several devices of a node can share a stage only if they have rows to share.
    rows = 1 if job.policy.devices_per_node == 1 else job.profile.microbatch_rows
    layers = tuple(_doubled(layer, job.profile.microbatch_rows, rows) for layer in job.profile.layers)
    policy = msgspec.structs.replace(
        job.policy, microbatch_rows=rows, activation_checkpointing="none", zero1=False
    )
    try:
        return max(
            2, Planner(msgspec.structs.replace(job.profile, layers=layers, microbatch_rows=rows), policy).n0
        )
    except (InfeasibleError, BatchError) as error:
        raise PolicyExcluded(
            "a stage with the state of the next one and without activation checkpointing does not fit into "
            "memory"
        ) from error


def _doubled(layer: LayerProfile, rows_before: int, rows: int) -> LayerProfile:
    return msgspec.structs.replace(
        layer,
        parameter_bytes=2 * layer.parameter_bytes,
        gradient_bytes=2 * layer.gradient_bytes,
        optimizer_bytes=2 * layer.optimizer_bytes,
        activation_bytes=-(-2 * layer.activation_bytes * rows // rows_before),
        output_bytes=-(-layer.output_bytes * rows // rows_before),
        split=(),
    )


class BambooPolicy(RecoveryPolicy):
    """Bamboo's reactions to changes of the cluster."""

    name: ClassVar[str] = "bamboo"

    def __init__(self, job: ReplayJob, parameters: Parameters, published: bool) -> None:
        """:raises PolicyExcluded: a pipeline has no next stage, the doubled state does not fit, or published
        throughput is asked for and the job has none.
        """
        self._times = times = parameters.section(self.name, BambooParameters)
        constants = published_constants(self.name, job) if published else None
        self._pace = Pace(job=job, published=constants)
        if constants is None:
            self._stages, self._slowdown = smallest_pipeline(job), 1 / (1 - times.overhead)
            state_s = job.state_bytes / times.state_bytes_per_s
            self._detect = pauses(("detecting", times.detect_s))
            self._reconfiguration = pauses(("restarting", times.reconfigure_s), ("moving", state_s))
            self._restart = pauses(("restarting", times.restart_s), ("moving", state_s))
            self._lost: Undo = "checkpoint"
        else:
            self._stages, self._slowdown = times.published_stages, 1.0
            self._detect = ()
            self._reconfiguration = pauses(("restarting", constants.restart_s))
            self._restart = pauses(("restarting", times.restart_s))
            self._lost = "iteration"
        self._departures = Departures()
        self._running: Running | None = None
        """The way of running that was decided last; ``None``: the job waits for nodes."""
        self._held: Pipelines = ()
        """Pipelines whose nodes hold the state of their own stage and of the next."""
        self._formed: Pipelines = ()
        """Pipelines that are formed, and replace ``_held`` at ``_formed_s``."""
        self._formed_s = 0.0
        self._failed: set[str] = set()
        """Nodes of ``_held`` that failed."""
        self._rest_s: float | None = None
        """Time from the resumption until the end of an iteration in which a node computes two stages; ``None``: none
        does.
        """

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``."""
        self._form(nodes, len(nodes), 0.0)
        return Reaction(running=self._running)

    def change(self, change: Change) -> Reaction | None:
        """Return the reaction to failures, to nodes that join or announce their removal, and to the end of an
        iteration in which a node computes two stages.
        """
        if self._formed and change.at_s >= self._formed_s and self._held is not self._formed:
            self._held, self._failed = self._formed, set()
        if change.leaving:
            return self._drain(change)
        members = self._departures.after(change)
        nodes = members.usable
        training = {node for pipeline in (*self._held, *self._formed) for node in pipeline}
        if not training.isdisjoint(members.failed):
            return self._fail(nodes, members.failed, change)
        if self._rest_s is not None:
            at_its_end = self.wake_at_s is not None and change.at_s >= self.wake_at_s
            return self._reconfigure(nodes, change, 0.0) if at_its_end else None
        if len(nodes) // self._stages > len(self._formed):
            return self._reconfigure(nodes, change, change.boundary_s)
        if not change.running or change.at_s < self._formed_s or not (change.added or change.removed):
            return None
        self._running = self._run(len(change.nodes))
        return Reaction(running=self._running)

    def _drain(self, change: Change) -> Reaction | None:
        """Form pipelines without nodes that announce their removal."""
        if self._running is None or not change.running or self._rest_s is not None:
            return None
        after_s = last_boundary_s(change, self._running.iteration_s)
        return None if after_s is None else self._reconfigure(self._departures.leave(change), change, after_s)

    def _fail(self, nodes: Sequence[str], failed: Iterable[str], change: Change) -> Reaction | None:
        self._failed.update(failed)
        if self._is_lost():
            self._held = ()
            self._form(nodes, len(change.nodes), change.at_s)
            steps = (*self._detect, *(self._restart if self._running is not None else ()))
            self._formed_s += total_s(steps)
            return Reaction(pauses=steps, running=self._running, undo=self._lost)
        if self._running is None and len(nodes) < self._stages:
            return None
        rest_s = self._rest_s
        if rest_s is None and change.running:
            rest_s = change.boundary_s * self._times.takeover_slowdown
        elif rest_s is not None and change.running:
            rest_s = change.boundary_s
        if not rest_s or self._running is None:
            return self._reconfigure(nodes, change, 0.0, failed=True)
        if self._rest_s is None:
            slow_s = self._running.iteration_s * self._times.takeover_slowdown
            self._running = self._pace.running_at(
                len(change.nodes), slow_s, self._running.samples, self._running.checkpoints
            )
        self._rest_s = rest_s
        self.wake_at_s = change.at_s + total_s(self._detect) + rest_s
        return Reaction(pauses=self._detect, running=self._running)

    def _is_lost(self) -> bool:
        """Return whether a stage and the one before it have failed in some pipeline, or nobody holds state yet."""
        return not self._held or any(
            node in self._failed and pipeline[index - 1] in self._failed
            for pipeline in self._held
            for index, node in enumerate(pipeline)
        )

    def _reconfigure(
        self, nodes: Sequence[str], change: Change, after_s: float, *, failed: bool = False
    ) -> Reaction:
        self._form(nodes, len(change.nodes), change.at_s + after_s)
        steps = (
            *(self._detect if failed else ()),
            *(self._reconfiguration if self._running is not None else ()),
        )
        self._formed_s += total_s(steps)
        return Reaction(pauses=steps, running=self._running, after_s=after_s)

    def _form(self, nodes: Sequence[str], present: int, at_s: float) -> None:
        """Form as many pipelines as ``nodes`` suffice for; none changes what is held."""
        count = len(nodes) // self._stages
        self._rest_s = self.wake_at_s = None
        formed = tuple(
            tuple(nodes[index * self._stages : (index + 1) * self._stages]) for index in range(count)
        )
        self._formed, self._formed_s = formed, at_s
        self._running = self._run(present)

    def _run(self, present: int) -> Running | None:
        """Return how the formed pipelines run, without a failed node."""
        if not self._formed:
            return None
        used = present if self._pace.published is not None else len(self._formed) * self._stages
        running = self._pace.running(present, used, slowdown=self._slowdown)
        if running is None or self._pace.published is not None:
            return running
        every = max(1, round(self._times.checkpoint_every_s / running.iteration_s))
        return replace(running, checkpoints=Checkpoints(every_iterations=every, stall_s=0.0))
