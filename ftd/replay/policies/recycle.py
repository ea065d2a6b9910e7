"""``recycle``: rerouted microbatches (Gandhi et al., "ReCycle", SOSP 2024).

Assumptions:

* All pipelines are copies of one template, so that the workers of a stage are interchangeable: at the start, the
  template with which full pipelines are fastest. Nodes that are left over are spares. The template is kept until
  the job starts again. Without failures, the pace is that of the job's best plan for as many nodes, which favours
  ReCycle where that plan has unequal pipelines; the baseline ``equal`` takes the time of its own pipelines.
* After a failure the microbatches of the dead node's stages go to the workers of the same stages in other
  pipelines (adaptive pipelining, section 3.1). No state moves, and schedules were computed beforehand. The
  iteration in flight is lost, because its gradients are. The iteration is longer by the quotient of two schedules
  (``ftd.replay.rerouting``): with rerouted microbatches, a decoupled backward and staggered optimizer steps
  (sections 3.2 and 3.3), and 1F1B without failures. It is never shorter, because the paper fills the idle slots
  of 1F1B and does not claim to be faster without failures.
* Failures are spread over the stages (failure normalization): while one stage has two workers fewer than another,
  a worker moves there and copies the state from a peer.
* A joining node, or a spare at a failure, takes the empty position in the stage with the fewest workers, at the
  end of the iteration in flight, and copies the state from a peer. The paper's job has all its nodes at the start;
  here spares that make a whole pipeline become one.
* If all workers of a stage are dead, the job starts again from a checkpoint on the nodes that are present, or waits
  until they hold a replica.
* With a notice of preemption a node leaves at the last end of an iteration before it is removed, unless it is the
  last of its stage.

Communication between stages is not counted when the two schedules are compared. Optimizer state that is divided
among replicas (ZeRO-1) is excluded: peers of a dead worker would lack its part.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import msgspec

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import Parameters, Seconds, TimedCheckpoints
from ftd.replay.policies.departures import Departures, last_boundary_s
from ftd.replay.policies.pace import Pace
from ftd.replay.policies.pauses import pauses, total_s
from ftd.replay.policy import (
    Change,
    Pause,
    PolicyExcluded,
    Reaction,
    RecoveryPolicy,
    Running,
    Undo,
)
from ftd.replay.rerouting import MemoryCap, Pipeline, Worker, estimate_iteration_s
from planner.values import Template

Position = tuple[int, int]
"""Pipeline, and node within the template."""


class RecycleParameters(TimedCheckpoints, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [recycle] of the parameters."""

    detect_s: Seconds
    """Time until a failure is known everywhere."""
    reroute_s: Seconds
    """Time to look the schedule up and to form process groups."""
    start_s: Seconds
    """Time to start the processes of a job that lost a stage."""
    weight_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Part of the time of a backward, without recomputed activations, that the gradients of the weights take."""
    decoupled: bool
    """Whether the backward for the weights can wait."""
    staggered: bool
    """Whether a stage begins the next iteration before the other stages have finished theirs."""
    spread: bool
    """Whether failures are spread over the stages."""
    baseline: Literal["1f1b", "same", "equal"]
    """Schedule without failures, and its time: ``1f1b``, that of the paper, takes the time of the job's best plan;
    ``same``, one with the same techniques, takes that time; ``equal`` is 1F1B in the equal pipelines and takes the
    planner's time for them.
    """
    memory_cap: MemoryCap
    """Microbatches whose activations fit into a device: any number, or those of 1F1B."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """``pipelines`` copies of a template."""

    job: ReplayJob
    parameters: RecycleParameters
    template: Template
    pipelines: int

    @property
    def nodes(self) -> int:
        """Return the number of positions."""
        return self.pipelines * self.template.nodes

    @cached_property
    def positions(self) -> tuple[Position, ...]:
        return tuple((p, offset) for p in range(self.pipelines) for offset in range(self.template.nodes))

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """State of each node of the template."""
        total = [0] * self.template.nodes
        for stage in self.template.stages:
            layers = self.job.profile.layers[stage.first_layer : stage.end_layer]
            total[stage.node_offset] += sum(layer.state_bytes for layer in layers)
        return tuple(total)

    @cached_property
    def work(self) -> tuple[Pipeline, ...]:
        """Work of each pipeline, with microbatches shared as evenly as possible."""
        stages = self.template.stages
        forward_ms, backward_ms, _ = self.job.planner.costs.pipeline_ms(stages)
        # A stage that recomputes its activations begins its backward with another forward.
        again_ms = [
            ms if stage.recompute == "full" else 0.0 for ms, stage in zip(forward_ms, stages, strict=True)
        ]
        share = self.parameters.weight_share
        weight_ms = [share * (ms - again) for ms, again in zip(backward_ms, again_ms, strict=True)]
        each, more = divmod(self.job.policy.microbatches, self.pipelines)
        return tuple(
            Pipeline(
                forward_s=tuple(ms / 1e3 for ms in forward_ms),
                backward_input_s=tuple(
                    (ms - of_weights) / 1e3 for ms, of_weights in zip(backward_ms, weight_ms, strict=True)
                ),
                backward_weight_s=tuple(ms / 1e3 for ms in weight_ms),
                microbatches=each + (pipeline < more),
            )
            for pipeline in range(self.pipelines)
        )

    def slowdown(self, empty: Iterable[Position]) -> float:
        """Return by which factor an iteration is longer while these positions are empty."""
        stages: list[list[int]] = [[] for _ in range(self.pipelines)]
        for pipeline, offset in empty:
            stages[pipeline] += [
                number for number, stage in enumerate(self.template.stages) if stage.node_offset == offset
            ]
        if not any(stages):
            return 1.0
        # Pipelines with equal work are interchangeable: in this order, many sets of dead workers are one.
        order = sorted(range(self.pipelines), key=lambda p: (self.work[p].microbatches, stages[p]))
        work = tuple(self.work[p] for p in order)
        dead = frozenset((number, stage) for number, p in enumerate(order) for stage in stages[p])
        parameters = self.parameters
        techniques = parameters.decoupled, parameters.staggered, parameters.memory_cap
        fault_free = techniques if parameters.baseline == "same" else (False, False, "1f1b")
        return max(1.0, _iteration_s(work, dead, *techniques) / _iteration_s(work, frozenset(), *fault_free))

    @cached_property
    def fault_free_s(self) -> float:
        """Time of an iteration of all pipelines with 1F1B."""
        return _equal_pipelines_ms(self.job, self.template, self.pipelines) / 1e3


def _equal_pipelines_ms(job: ReplayJob, template: Template, pipelines: int) -> float:
    """Return the planner's time of an iteration of so many copies of a template."""
    most = -(-job.policy.microbatches // pipelines)
    return job.planner.costs.step_cost(template.stages, pipelines)(most)


@lru_cache(maxsize=4096)
def _iteration_s(
    work: tuple[Pipeline, ...],
    dead: frozenset[Worker],
    decoupled: bool,
    staggered: bool,
    memory_cap: MemoryCap,
) -> float:
    """Return ``estimate_iteration_s``, which repeated replays of a job ask for again and again."""
    return estimate_iteration_s(work, dead, decoupled=decoupled, staggered=staggered, memory_cap=memory_cap)


class RecyclePolicy(RecoveryPolicy):
    """ReCycle's reactions to changes of the cluster."""

    name = "recycle"

    def __init__(self, job: ReplayJob, parameters: Parameters) -> None:
        """:raises PolicyExcluded: replicas do not hold the whole optimizer state."""
        if job.planner.costs.policy.zero1:
            raise PolicyExcluded(
                "replicas share out the optimizer state (ZeRO-1), so peers lack a dead node's part"
            )
        self._job = job
        self._parameters = parameters.section(self.name, RecycleParameters)
        self._load_s = job.state_bytes / self._parameters.store_bytes_per_s
        """Time to write or read a checkpoint."""
        self._pace = Pace(job=job)
        self._departures = Departures()
        self._layout: _Layout | None = None
        """``None``: the job waits."""
        self._placed: dict[Position, str] = {}
        """Nodes in positions."""
        self._copying: set[Position] = set()
        """Positions that hold no state before ``_ready_s``."""
        self._ready_s = 0.0
        """Time at which the last pauses end."""
        self._pauses: tuple[Pause, ...] = ()
        """The last pauses."""
        self._iteration_s = 0.0

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``."""
        if len(nodes) < self._job.planner.fewest_nodes:
            return Reaction(running=None)
        return Reaction(running=self._running(self._place(nodes), len(nodes)))

    def change(self, change: Change) -> Reaction | None:
        """Return the reaction to failures, to nodes that join, and to nodes that announce their removal."""
        if change.at_s >= self._ready_s:
            self._copying.clear()
        if change.leaving:
            return self._leave(change)
        members = self._departures.after(change)
        if not members.failed and not change.added:
            return None
        if self._layout is None:
            return self._restart(members.usable, change, failed=False)
        dead = {at for at, node in self._placed.items() if node in members.failed}
        if dead and self._loses_stage(dead):
            return self._restart(members.usable, change, failed=True)
        filled = self._rearrange(self._layout, dead, members.usable)
        if dead:
            steps = (*self._detect(), *self._regroup(self._copying | filled))
            return self._react(steps, change, undo="iteration")
        if change.running:
            steps = self._regroup(self._copying | filled) if self._copying or filled else ()
            return self._react(steps, change, after_s=change.boundary_s if steps else 0.0)
        return self._react((*self._left(change.at_s), *self._regroup(filled)), change) if filled else None

    def _leave(self, change: Change) -> Reaction | None:
        """Return the reaction to a notice: nodes leave where there is time, and no stage is lost by it."""
        leaving = {at for at, node in self._placed.items() if node in change.leaving}
        after_s = last_boundary_s(change, self._iteration_s) if change.running else None
        if self._layout is None or after_s is None or self._loses_stage(leaving):
            return None
        filled = self._rearrange(self._layout, leaving, self._departures.leave(change))
        return (
            self._react(self._regroup(self._copying | filled), change, after_s=after_s) if leaving else None
        )

    def _loses_stage(self, dead: Collection[Position]) -> bool:
        """Return whether the positions that hold state lack a stage without ``dead``."""
        assert self._layout is not None
        holders = self._placed.keys() - self._copying - set(dead)
        return len({offset for _, offset in holders}) < self._layout.template.nodes

    def _restart(self, nodes: Sequence[str], change: Change, *, failed: bool) -> Reaction | None:
        """Return a start from the checkpoint, or the wait for enough nodes.

        :param failed: whether a failure stops the job; otherwise it waits already.
        """
        steps = self._detect() if failed else ()
        undo: Undo = "checkpoint" if failed else "nothing"
        if len(nodes) < self._job.planner.fewest_nodes:
            self._layout = None
            return Reaction(pauses=steps, running=None, undo=undo) if failed else None
        self._place(nodes)
        self._copying = set(self._placed)
        starting = pauses(("restarting", self._parameters.start_s), ("moving", self._load_s))
        return self._react((*steps, *starting), change, undo=undo)

    def _detect(self) -> tuple[Pause, ...]:
        return pauses(("detecting", self._parameters.detect_s))

    def _react(
        self, steps: tuple[Pause, ...], change: Change, *, undo: Undo = "nothing", after_s: float = 0.0
    ) -> Reaction:
        assert self._layout is not None
        self._pauses = steps
        self._ready_s = change.at_s + after_s + total_s(steps)
        running = self._running(self._layout, len(change.nodes))
        return Reaction(pauses=steps, running=running, undo=undo, after_s=after_s)

    def _running(self, layout: _Layout, present: int) -> Running:
        best_s = self._pace.iteration_s(layout.nodes)
        fault_free_s = layout.fault_free_s if self._parameters.baseline == "equal" else best_s
        assert fault_free_s is not None
        self._iteration_s = fault_free_s * layout.slowdown(set(layout.positions) - self._placed.keys())
        checkpoints = self._parameters.checkpoints(self._iteration_s, self._load_s)
        return self._pace.running_at(present, self._iteration_s, self._pace.samples, checkpoints)

    def _left(self, at_s: float) -> tuple[Pause, ...]:
        """Return what is left of the last pauses."""
        left: list[Pause] = []
        end_s = self._ready_s
        for pause in reversed(self._pauses):
            if end_s > at_s:
                left.append(Pause(category=pause.category, seconds=min(pause.seconds, end_s - at_s)))
            end_s -= pause.seconds
        return tuple(reversed(left))

    def _regroup(self, copying: Collection[Position]) -> tuple[Pause, ...]:
        """Let the positions ``copying`` copy their state from peers, and return the pauses of new groups.

        Stages copy at the same time, and in a stage every worker with state sends to one other at a time.
        """
        assert self._layout is not None
        self._copying |= set(copying)
        link, state_bytes = self._job.profile.link, self._layout.state_bytes
        senders = Counter(offset for _, offset in self._placed.keys() - set(copying))
        receivers = Counter(offset for _, offset in copying)
        moving_ms = max(
            (-(-n // senders[offset]) * link.time_ms(state_bytes[offset]) for offset, n in receivers.items()),
            default=0.0,
        )
        return pauses(("restarting", self._parameters.reroute_s), ("moving", moving_ms / 1e3))

    def _place(self, nodes: Sequence[str]) -> _Layout:
        """Use the template with which full pipelines are fastest, with peers for every worker if possible."""
        job = self._job
        batch = job.policy.microbatches
        choices: list[tuple[bool, float, int, int]] = []
        templates = job.planner.instantiator(len(nodes)).templates.by_nodes
        for size, template in templates.items():
            pipelines = min(len(nodes) // size, batch)
            if pipelines:
                iteration_ms = _equal_pipelines_ms(job, template, pipelines)
                choices.append((pipelines < 2, iteration_ms, size, pipelines))
        _, _, size, pipelines = min(choices)
        self._layout = _Layout(
            job=job, parameters=self._parameters, template=templates[size], pipelines=pipelines
        )
        self._placed = dict(zip(self._layout.positions, nodes, strict=False))
        return self._layout

    def _rearrange(self, layout: _Layout, dead: Collection[Position], usable: Sequence[str]) -> set[Position]:
        """Empty the ``dead`` positions, and return those that were filled with other nodes."""
        for at in dead:
            del self._placed[at]
        self._copying -= set(dead)
        placed = set(self._placed.values())
        spares = [node for node in usable if node not in placed]
        before = set(self._placed)
        while spares and len(self._placed) < layout.nodes:
            self._placed[self._emptiest(layout)] = spares.pop(0)
        while self._parameters.spread and self._spread(layout):
            pass
        size = layout.template.nodes
        while len(spares) >= size and layout.pipelines < self._job.policy.microbatches:
            new = [(layout.pipelines, offset) for offset in range(size)]
            self._placed |= dict(zip(new, spares, strict=False))
            del spares[:size]
            self._layout = layout = replace(layout, pipelines=layout.pipelines + 1)
        self._copying &= self._placed.keys()
        return self._placed.keys() - before

    def _workers(self, layout: _Layout) -> list[int]:
        """Return the number of workers for each node of the template."""
        count = Counter(offset for _, offset in self._placed)
        return [count[offset] for offset in range(layout.template.nodes)]

    def _emptiest(self, layout: _Layout) -> Position:
        """Return the first empty position of the stage with the fewest workers."""
        workers = self._workers(layout)
        offset = workers.index(min(workers))
        return next((p, offset) for p in range(layout.pipelines) if (p, offset) not in self._placed)

    def _spread(self, layout: _Layout) -> bool:
        """Move a worker from the stage with most to the stage with fewest, if that makes them more equal."""
        workers = self._workers(layout)
        most = max(workers)
        if most - min(workers) < 2:
            return False
        offset = workers.index(most)
        # Moving a worker that holds no state yet costs nothing more.
        last = max((at for at in self._placed if at[1] == offset), key=lambda at: (at in self._copying, at))
        target = self._emptiest(layout)
        self._placed[target] = self._placed.pop(last)
        return True
