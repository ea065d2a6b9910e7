"""``oobleck``: pipeline templates as published (Jang et al., "Oobleck", SOSP 2023).

Assumptions:

* Pipelines come from templates of n₀ and more nodes (§4.1.1). At the start, and when nodes join (§3.3), the best
  instantiation of them runs (§4.2). The paper does not say when joined nodes are taken in; here that is at the end
  of the iteration in flight, so that nothing is lost.
* A failure replaces the affected pipelines by the steps of §5.1: simple reinstantiation, borrowing nodes, merging
  pipelines; if these steps reach a dead end, the best instantiation. The pause is detection by a closed socket
  (§6.2), new process groups, and the copy of the missing layers. The iteration in flight is lost (§7.4.2).
* The job stops below (f + 1)·n₀ nodes, stores its progress, and starts again from there when enough nodes are back
  (§3.4, §5).
* If no survivor holds some layer, the job starts again from a checkpoint (§3.4), which it writes now and then while
  it trains. A failure before a copy is complete finds the layers where they were before the copy.
* With a notice of preemption (§7.3) nodes leave at the last end of an iteration before they are removed, and
  nothing is lost.

With published throughput the pause is the one fitted for each model, and nodes only count: no layer is ever lost,
and there are no checkpoints.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import Parameters, Seconds, TimedCheckpoints
from ftd.replay.policies.departures import Departures, last_boundary_s
from ftd.replay.policies.pace import Pace, published_constants
from ftd.replay.policies.pauses import pauses, total_s
from ftd.replay.policy import Change, Pause, Reaction, RecoveryPolicy, Running, Undo
from planner.changes.assignment import Assigner
from planner.changes.candidates import PipelineLayout, first_layout, reinstantiate
from planner.changes.cover import held_by, whole_layers
from planner.changes.tradeoff import DEFAULT_HORIZON_S, choose_layout, place_stages
from planner.reasons import natural_key
from planner.values import Device, PipelinePlacement


class OobleckParameters(TimedCheckpoints, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of Oobleck's recovery for throughput that is not the published one."""

    detect_s: Seconds
    """Time until a failure is known everywhere."""
    regroup_s: Seconds
    """Time to look pipelines up and to form process groups."""
    start_s: Seconds
    """Time to start the processes of a job that stopped."""


class OobleckPolicy(RecoveryPolicy):
    """Oobleck's reactions to changes of the cluster."""

    name: ClassVar[str] = "oobleck"

    def __init__(self, job: ReplayJob, parameters: Parameters, published: bool) -> None:
        """:raises PolicyExcluded: published throughput is asked for and the job has none."""
        constants = published_constants(self.name, job) if published else None
        self._pace = Pace(job=job, published=constants)
        if constants is None:
            self._times = parameters.section(self.name, OobleckParameters)
        else:
            self._times = OobleckParameters(
                detect_s=0.0,
                regroup_s=constants.restart_s,
                start_s=constants.restart_s,
                store_bytes_per_s=math.inf,
                checkpoint_every_s=math.inf,
                checkpoint_stall_s=0.0,
            )
        self._placements = _Placements(job) if constants is None else None
        self._fewest = (job.policy.tolerate + 1) * job.planner.n0
        self._store_s = job.state_bytes / self._times.store_bytes_per_s
        self._departures = Departures()
        self._running: Running | None = None
        """The way of running that was decided last; ``None``: the job stopped."""
        self._stored_s = 0.0
        """Time at which the progress of a job that stopped is stored."""

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``, which have its state."""
        if len(nodes) >= self._fewest:
            iteration_s = None if self._placements is None else self._placements.begin(nodes, 0.0)
            self._running = self._run(len(nodes), len(nodes), iteration_s)
        return Reaction(running=self._running)

    def change(self, change: Change) -> Reaction | None:
        """Return the reaction to failures, to nodes that join, and to nodes that announce their removal."""
        if change.leaving:
            return self._drain(change)
        members = self._departures.after(change)
        if not members.failed and not change.added:
            return None
        if self._running is None:
            return self._while_stopped(members.usable, change, failed=bool(members.failed))
        if members.failed:
            return self._go_on(members.usable, change, 0.0, failed=True)
        return self._go_on(members.usable, change, change.boundary_s, failed=False)

    def _drain(self, change: Change) -> Reaction | None:
        """Let nodes leave before they are removed, if the others hold the state."""
        if self._running is None or not change.running:
            return None
        after_s = last_boundary_s(change, self._running.iteration_s)
        staying = [node for node in change.nodes if node not in change.leaving]
        if after_s is None or not self._hold_state(staying, change.at_s):
            return None
        return self._go_on(self._departures.leave(change), change, after_s, failed=False)

    def _go_on(self, nodes: Sequence[str], change: Change, after_s: float, *, failed: bool) -> Reaction:
        """Return the reaction of a job that has not stopped."""
        detect = pauses(("detecting", self._times.detect_s if failed else 0.0))
        if not self._hold_state(nodes, change.at_s):
            if len(nodes) >= self._fewest:
                return self._restart(nodes, change, detect, is_lost=True)
            self._running, self._stored_s = None, change.at_s
            return Reaction(pauses=detect, running=None, undo="checkpoint")
        undo: Undo = "iteration" if failed else "nothing"
        begins_s = change.at_s + after_s
        if len(nodes) < self._fewest:
            stopping = (*detect, *pauses(("stalled", self._store_s)))
            self._running, self._stored_s = None, begins_s + total_s(stopping)
            return Reaction(
                pauses=stopping, running=None, undo=undo, after_s=after_s, saved_s=total_s(stopping)
            )
        iteration_s, moving_s = None, 0.0
        if self._placements is not None:
            iteration_s, moving_s = self._placements.replace(nodes, change.at_s, begins_s)
        steps = (*detect, *pauses(("restarting", self._times.regroup_s), ("moving", moving_s)))
        if self._placements is not None:
            self._placements.copied_s = begins_s + total_s(steps)
        self._running = self._run(len(change.nodes), len(nodes), iteration_s)
        return Reaction(pauses=steps, running=self._running, undo=undo, after_s=after_s)

    def _while_stopped(self, nodes: Sequence[str], change: Change, *, failed: bool) -> Reaction | None:
        """Return the reaction of a job that waits for nodes."""
        is_lost = failed and change.at_s < self._stored_s and not self._hold_state(nodes, change.at_s)
        if len(nodes) >= self._fewest:
            return self._restart(nodes, change, (), is_lost=is_lost)
        if not is_lost:
            return None
        self._stored_s = change.at_s
        return Reaction(running=None, undo="checkpoint")

    def _restart(
        self, nodes: Sequence[str], change: Change, detect: tuple[Pause, ...], *, is_lost: bool
    ) -> Reaction:
        """Start the processes again and load the state."""
        steps = (*detect, *pauses(("restarting", self._times.start_s), ("moving", self._store_s)))
        iteration_s = None
        if self._placements is not None:
            iteration_s = self._placements.begin(nodes, change.at_s + total_s(steps))
        self._running = self._run(len(change.nodes), len(nodes), iteration_s)
        return Reaction(pauses=steps, running=self._running, undo="checkpoint" if is_lost else "nothing")

    def _hold_state(self, nodes: Sequence[str], at_s: float) -> bool:
        return self._placements is None or self._placements.hold_state(nodes, at_s)

    def _run(self, present: int, used: int, iteration_s: float | None) -> Running | None:
        """:param iteration_s: of the placed pipelines; ``None``: as published for so many nodes."""
        if iteration_s is None:
            return self._pace.running(present, used)
        checkpoints = self._times.checkpoints(iteration_s, self._store_s)
        return self._pace.running_at(present, iteration_s, self._pace.samples, checkpoints)


class _Placements:
    """Pipelines on named nodes, and the layers that the nodes hold over time."""

    def __init__(self, job: ReplayJob) -> None:
        self._planner, self._link = job.planner, job.profile.link
        self._assigner = Assigner(job.profile)
        self._layers, self._devices = len(job.profile.layers), job.policy.devices_per_node
        self._pipelines: tuple[PipelinePlacement, ...] = ()
        """Pipelines that run, or that were to run before a failure."""
        self._next: tuple[PipelinePlacement, ...] = ()
        self._begins_s = 0.0
        """Time at which ``_next`` replaces ``_pipelines``."""
        self._held: dict[Device, frozenset[int]] = {}
        self.copied_s = 0.0
        """Time from which the devices hold what ``_next`` needs, instead of ``_held``."""

    def begin(self, nodes: Sequence[str], ready_s: float) -> float:
        """Place the best instantiation on ``nodes``, which hold nothing until ``ready_s``, and return the time of
        an iteration.
        """
        self._held = self._planner.initial_situation(nodes).holdings
        iteration_s, _ = self._place(
            nodes, first_layout(self._planner.instantiator(len(nodes)).best(len(nodes)))
        )
        self._pipelines, self._held, self.copied_s = self._next, {}, ready_s
        return iteration_s

    def replace(self, nodes: Sequence[str], at_s: float, begins_s: float) -> tuple[float, float]:
        """Replace the pipelines at ``begins_s``, and return the times of an iteration and of the copies."""
        self._settle(at_s)
        self._begins_s = begins_s
        return self._place(nodes, self._layout(nodes))

    def hold_state(self, nodes: Sequence[str], at_s: float) -> bool:
        """Return whether ``nodes`` hold every layer."""
        self._settle(at_s)
        masks = self._assigner.masks(nodes, self._devices, self._held)
        return held_by(nodes, masks) == (1 << self._layers) - 1

    def _settle(self, at_s: float) -> None:
        if at_s >= self._begins_s:
            self._pipelines = self._next
        if at_s >= self.copied_s:
            self._held = {
                device: frozenset(range(stage.first_layer, stage.end_layer))
                for pipeline in self._next
                for stage in pipeline.stages
                for device in stage.devices
            }

    def _layout(self, nodes: Sequence[str]) -> PipelineLayout:
        """Return the pipelines after the steps of §5.1, or the best instantiation after a join or a dead end."""
        present = set(nodes)
        instantiator = self._planner.instantiator(len(nodes))
        names = [pipeline.nodes for pipeline in self._pipelines]
        if present.issubset(node for of_pipeline in names for node in of_pipeline):
            found = reinstantiate(
                [len(of_pipeline) for of_pipeline in names],
                [sum(node in present for node in of_pipeline) for of_pipeline in names],
                instantiator.templates.sizes,
            )
            if found is not None and len(found.pipelines) >= instantiator.required(len(nodes)):
                return found
        return first_layout(instantiator.best(len(nodes)))

    def _place(self, nodes: Sequence[str], layout: PipelineLayout) -> tuple[float, float]:
        names = sorted(nodes, key=natural_key)
        masks = self._assigner.masks(names, self._devices, self._held)
        instantiator = self._planner.instantiator(len(names))
        found, _ = choose_layout(
            [layout],
            instantiator=instantiator,
            assigner=self._assigner,
            nodes=names,
            masks=masks,
            needs=whole_layers(masks, self._layers),
            earlier=[pipeline.nodes for pipeline in self._pipelines],
            link=self._link,
            horizon_s=DEFAULT_HORIZON_S,
        )
        self._next = place_stages(found, instantiator.templates.by_nodes, self._assigner, masks)
        moving_s = found.considered.transfer_s
        assert moving_s is not None, "a single layout's bytes are counted"
        return found.instantiation.iteration_ms / 1e3, moving_s
