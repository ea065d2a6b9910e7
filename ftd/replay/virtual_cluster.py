"""A cluster in virtual time: the real cluster machine and the real planner, with nodes that always answer.

The coordinator's machine receives the messages that nodes would send and its effects are carried out, as in
production. What takes time takes the measured durations of ``FtdParameters`` instead. Four things are left
out, because they change no result and would be most of the work: heartbeats (the end of a node is reported after
``detect_s``), the machine's tick, commits other than the newest at each change, and snapshots that no rollback
uses: before nodes are lost that may take state with them, the newest snapshot that would be complete is reported.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import msgspec

from ftd.coordinator.plan_answer import answer_question
from ftd.coordinator.restore_check import check_restore
from ftd.coordinator.speculative_planning import make_plan
from ftd.errors import ConfigurationError
from ftd.replay.job import ReplayJob
from ftd.replay.parameters import BytesPerS, Seconds
from ftd.replay.policy import Category
from planner.changes.transition import busiest_bytes
from planner.intervals import WRITE_PERIODS
from planner.values import Device, Plan
from statemachine.cluster.machine import ClusterEvent, ClusterMachine
from statemachine.cluster.rules import owned_layers
from statemachine.cluster.snapshots.protections import AUTO
from statemachine.cluster.state import JOIN, STEPS, TICK
from statemachine.effects import (
    BroadcastCommand,
    BuildTemplates,
    CancelTimer,
    CheckDrain,
    CheckRestore,
    ComputePlan,
    Effect,
    FindCheckpoint,
    SendCommand,
    SetTimer,
)
from statemachine.events import (
    BrokerConnected,
    CheckpointFound,
    NodeVanished,
    SignalArrived,
    SubmitRequested,
    TemplatesReady,
    TimerFired,
)
from statemachine.messages.cluster import (
    Command,
    Fence,
    FromNode,
    Hello,
    Leaving,
    Prepare,
    Quiesced,
    RequestHello,
    Resume,
    Signal,
    SnapshotCompleted,
    Stepped,
)
from statemachine.messages.common import Prepared, Quiesce, Resumed
from statemachine.messages.values import (
    CheckpointPolicy,
    CheckpointRecord,
    ClusterPhase,
    CommittedStep,
    DeviceReport,
    Job,
    NodeFacts,
    QuiesceMode,
    SnapshotPolicy,
    Vote,
)
from statemachine.timing import Timing
from storage.codes import parse_scheme

COMMIT_DELAY_S = 1e-3
"""Time after the end of a step at which its commit is looked for."""

_CAUSE = "replay"
_ENDLESS_STEPS = 10**12
_VOTE = Vote(loss=1.0, gradient_norm=1.0)


class FtdParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [ftd] of the parameters."""

    detect_s: Seconds
    """From the end of a node to the coordinator's notice of it."""
    quiesce_s: Seconds
    """From the Quiesce to the last report, if trainers stop at once."""
    plan_s: Seconds
    """Time of the planner."""
    rendezvous_s: Seconds
    """From the Resume until the trainers have met."""
    prepare_s: Seconds
    """From the start of a node until its trainers have built the job. Training goes on meanwhile."""
    transfer_bytes_per_s: BytesPerS | None = None
    """Rate at which one device receives or sends state of others; left out: that of the job's link."""
    restore_bytes_per_s: BytesPerS
    """Rate at which one device gets its state from snapshots in host memory."""
    storage_bytes_per_s: BytesPerS
    """Rate at which all devices together read and write a persistent checkpoint."""
    snapshot_every: Annotated[int, msgspec.Meta(ge=0)]
    """Steps between two snapshots in host memory; 0: none."""
    snapshot_stall_s: Seconds
    """Time for which training waits for a snapshot."""
    snapshot_write_s: Seconds
    """From the step's commit until its snapshot is complete everywhere."""
    protection: str
    """Protection scheme of snapshots."""
    checkpoint_every: Annotated[int, msgspec.Meta(ge=1)] | Literal["auto"]
    """Steps between two persistent checkpoints, which are written in the background; ``auto``: as few as the storage
    allows (``planner.intervals.WRITE_PERIODS``).
    """
    checkpoint_cost_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Share of the time of a write by which it delays training (``planner.intervals.checkpoint_cost_share``)."""
    keep_gradients: bool = False
    """Estimate of what ftd does not do: after a loss, pipelines that have lost no node keep the gradients of the
    microbatches that they have completed, and only the others are computed again.
    """

    def __post_init__(self) -> None:
        """:raises ConfigurationError: there is no such protection scheme."""
        if self.protection == AUTO:
            return
        try:
            parse_scheme(self.protection)
        except ValueError as error:
            raise ConfigurationError(
                str(error), field="protection", remedy="write one of these, or auto"
            ) from None

    def checkpoint_write_s(self, state_bytes: int) -> float:
        """Return the time of a checkpoint of ``state_bytes``, from its order until it is complete."""
        return state_bytes / self.storage_bytes_per_s

    def checkpoint_cost_s(self, state_bytes: int) -> float:
        """Return the training time that a checkpoint of ``state_bytes`` takes."""
        return self.checkpoint_cost_share * self.checkpoint_write_s(state_bytes)

    def checkpoint_steps(self, state_bytes: int, step_s: float) -> int:
        """Return the steps between two checkpoints of ``state_bytes``."""
        if self.checkpoint_every != "auto":
            return self.checkpoint_every
        write_s = self.checkpoint_write_s(state_bytes)
        return max(1, self.snapshot_every, math.ceil(WRITE_PERIODS * write_s / step_s))


@dataclass(slots=True)
class _VirtualNode:
    """A node that answers, and the state that its devices hold."""

    incarnation: int
    leaving: bool = False
    """True if the node announces with its Hello that it will leave."""
    step: int = 0
    lineage: int = 0
    held: dict[int, frozenset[int]] = field(default_factory=dict)
    """Layers by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Span of time with one use; ``running``, the time in which steps commit, is no category."""

    use: Category | Literal["running"]
    seconds: float


class VirtualCluster:
    """The coordinator's machine with virtual nodes. The caller advances its time."""

    def __init__(self, job: ReplayJob, parameters: FtdParameters) -> None:
        self._job, self._parameters = job, parameters
        self._layers = len(job.profile.layers)
        self._everything = frozenset(range(self._layers))
        self.now = 0.0
        self._machine = ClusterMachine(Timing(resume_s=86_400.0, restore_s=86_400.0, start_settle_s=1e-6))
        self._nodes: dict[str, _VirtualNode] = {}
        self._coming: dict[str, _VirtualNode] = {}
        """Nodes that have started and have not said Hello."""
        self._incarnations = itertools.count(1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._timers: dict[str, int] = {}
        """Order number of each timer that is set; an entry of the queue with another number is void."""
        self._undetected: dict[str, int] = {}
        """Incarnations of nodes that have ended and whose end the coordinator does not know."""
        self._plan: Plan | None = None
        """The plan that trains, or trained last."""
        self._owned: dict[str, dict[int, frozenset[int]]] = {}
        """Layers that this plan gives to the devices of each of its nodes."""
        self._resuming: Resume | None = None
        self._moving = False
        """Whether the group that forms has met and moves state."""
        self._trains = False
        """Whether a group commits steps now."""
        self._step = 0
        self._boundary_s = 0.0
        """Time of the end of a step, from which later ones follow."""
        self._free = True
        """Whether everything takes no time, as before the start."""
        self._group_began = 0
        """Step from which the group that trains began."""
        self._rolled_back_to: int | None = None
        self._newest_checkpoint = 0
        """Step of the checkpoint that was found last; 0: none was."""

    # --- the caller's view ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan under which a group trains; ``None``: none trains."""
        return self._plan if self._trains else None

    @property
    def use(self) -> Category | Literal["running"]:
        """Use of the present moment."""
        if self._trains:
            return "running"
        if any(name in self._nodes_of_plan() for name in self._undetected):
            return "detecting"
        match self._machine.phase:
            case ClusterPhase.QUIESCING:
                return "planning"
            case ClusterPhase.RECOVERING if self._resuming is not None:
                return "moving" if self._moving else "restarting"
            case ClusterPhase.RECOVERING:
                return "planning"
            case _:
                return "waiting"

    @property
    def is_stopping(self) -> bool:
        """Whether the group that trains will stop at the end of its step."""
        return self._trains and self._machine.phase is ClusterPhase.QUIESCING

    @property
    def awaits_commit(self) -> bool:
        """Whether the group that trains has committed nothing yet, so that its recovery is not over."""
        return self._trains and self._step == self._group_began

    @property
    def failed(self) -> bool:
        """Whether the job has lost its state for good."""
        return self._machine.phase is ClusterPhase.FAILED

    def take_rollback(self) -> int | None:
        """Return the step of the newest rollback that was not asked for yet; ``None``: there was none."""
        step, self._rolled_back_to = self._rolled_back_to, None
        return step

    def start(self, nodes: Iterable[str], at_s: float = 0.0) -> None:
        """Start the job on ``nodes`` at ``at_s``; this takes no virtual time."""
        self._feed(BrokerConnected(at=self.now, cause=_CAUSE))
        for node in nodes:
            self._nodes[node] = self._new_node(at_start=True)
            self._say(node, self._hello())
        automatic = self._parameters.protection == AUTO
        job = Job(
            job_id=_CAUSE,
            name=self._job.name,
            steps=_ENDLESS_STEPS,
            policy=self._job.policy,
            snapshot=SnapshotPolicy(
                every_steps=self._parameters.snapshot_every,
                protection="none" if automatic else self._parameters.protection,
                auto_protection=automatic,
                paused=True,
            ),
            checkpoint=CheckpointPolicy(url="virtual"),
        )
        self._feed(
            SubmitRequested(at=self.now, cause=_CAUSE, request=_CAUSE, job=job, profile=self._job.profile)
        )
        while self._queue and not self._trains:
            at_s, _, action = heapq.heappop(self._queue)
            self.now = at_s
            action()
        waited_s, self.now = self.now, at_s
        self._queue = [(at_s + max(0.0, due - waited_s), order, action) for due, order, action in self._queue]
        heapq.heapify(self._queue)
        self._free = False

    def committed(self, step: int, boundary_s: float) -> None:
        """Report that a group has committed ``step`` by now.

        :param boundary_s: time of the end of the step in flight, or of one that begins now.
        """
        self._boundary_s = boundary_s
        if not self._trains or step <= self._step:
            return
        self._step = step
        self._machine.cluster.progress.published_step = step - 1  # Nobody asks for the steps in between.
        assert self._plan is not None and self._resuming is None
        first = self._plan.devices[0].node
        stepped = Stepped(
            generation=self._machine.generation,
            steps=(CommittedStep(step=step, vote=_VOTE),),
            step_s=self._plan.estimated_iteration_s,
            lineage=self._machine.cluster.lineage,
        )
        self._say(first, stepped)

    def lose(self, names: Iterable[str]) -> None:
        """End these nodes now; their memory is lost."""
        names = list(names)
        for name in names:
            self._coming.pop(name, None)
        lost = [name for name in names if name in self._nodes]
        if not self._nodes_of_plan().isdisjoint(lost):
            self._note_state()
            if self._endangers_state(lost):
                self._complete_snapshot()
            self._trains = False
        for name in lost:
            node = self._nodes.pop(name)
            self._undetected[name] = node.incarnation
            self._later(self._parameters.detect_s, partial(self._vanished, name, node))

    def add(self, names: Iterable[str]) -> None:
        """Start nodes, which hold nothing."""
        for name in names:
            node = self._coming[name] = self._new_node(at_start=False)
            # A node of the same name may have ended in this instant; its end is noticed first.
            self._later(self._parameters.detect_s, partial(self._appear, name, node))

    def leave(self, names: Iterable[str]) -> None:
        """Let nodes announce that they will leave."""
        for name in names:
            if name in self._coming:
                self._coming[name].leaving = True
            elif name in self._nodes:
                self._say_leaving(name)

    @property
    def next_s(self) -> float | None:
        """Time of the next event; ``None``: nothing is under way."""
        while self._queue and self._is_void(self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def advance(self, until_s: float) -> None:
        """Carry out the next event if it is due before ``until_s``, or else let the time pass until then."""
        next_s = self.next_s
        if next_s is None or next_s >= until_s:
            self.now = until_s
            return
        at_s, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, at_s)
        action()

    # --- nodes ------------------------------------------------------------------------------------

    @property
    def _devices(self) -> range:
        return range(self._job.policy.devices_per_node)

    def _nodes_of_plan(self) -> frozenset[str]:
        plan = self._resuming.plan if self._resuming is not None else self._plan
        return frozenset(plan.nodes) if plan is not None else frozenset()

    def _new_node(self, *, at_start: bool) -> _VirtualNode:
        held = self._everything if at_start else frozenset()
        return _VirtualNode(incarnation=next(self._incarnations), held=dict.fromkeys(self._devices, held))

    def _hello(self) -> Hello:
        facts = NodeFacts(devices=len(self._devices), host="virtual", rendezvous_port=1, snapshot_port=2)
        return Hello(facts=facts, job_id=None, prepared=False, generation=0, training=False)

    def _appear(self, name: str, node: _VirtualNode) -> None:
        if self._coming.get(name) is not node:
            return  # It has ended.
        self._nodes[name] = self._coming.pop(name)
        self._say(name, self._hello())
        if node.leaving:
            self._say_leaving(name)

    def _say_leaving(self, name: str) -> None:
        self._say(name, Leaving(reason="the trace announces its removal"))

    def _vanished(self, name: str, node: _VirtualNode) -> None:
        if self._undetected.get(name) == node.incarnation:
            del self._undetected[name]
        self._feed(NodeVanished(at=self.now, cause=_CAUSE, node=name, incarnation=node.incarnation))

    def _note_state(self) -> None:
        """Note what the nodes of the group hold now, before it stops. While it trains nobody asks."""
        if not self._trains or self._step == self._group_began:
            return
        for name, held in self._owned.items():
            node = self._nodes[name]
            node.step, node.held = self._step, dict(held)

    def _endangers_state(self, lost: Iterable[str]) -> bool:
        """Return whether no other node would hold some layer without these."""
        gone = frozenset(lost)
        kept = [
            node.held for name, node in self._nodes.items() if name not in gone and node.step == self._step
        ]
        return len(frozenset().union(*(layers for held in kept for layers in held.values()))) < self._layers

    def _complete_snapshot(self) -> None:
        """Report the newest snapshot that is complete everywhere by now."""
        every, plan = self._parameters.snapshot_every, self.plan
        if not every or plan is None:
            return
        writing = math.ceil(self._parameters.snapshot_write_s / plan.estimated_iteration_s)
        step = (self._step - writing) // every * every
        newest = self._machine.cluster.snapshots.newest
        if step <= max(self._group_began, newest.step if newest is not None else 0):
            return
        signal = SnapshotCompleted(
            generation=self._machine.generation, step=step, vote=_VOTE, size_bytes=0, copy_s=0.0, stall_s=0.0
        )
        self._say_all(dict.fromkeys(plan.nodes, signal))

    # --- messages and effects ------------------------------------------------------------------------

    def _say(self, name: str, signal: Signal) -> None:
        self._say_all({name: signal})

    def _say_all(self, signals: Mapping[str, Signal]) -> None:
        """Deliver signals of nodes that are there, together."""
        self._feed(
            *(
                SignalArrived(
                    at=self.now,
                    cause=_CAUSE,
                    message=FromNode(node=name, incarnation=self._nodes[name].incarnation, signal=signal),
                )
                for name, signal in signals.items()
                if name in self._nodes
            )
        )

    def _feed(self, *events: ClusterEvent) -> None:
        for effect in self._machine.steps(events):
            self._carry_out(effect)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._push(0.0 if self._free else delay_s, action)

    def _push(self, delay_s: float, action: Callable[[], None]) -> int:
        order = next(self._order)
        heapq.heappush(self._queue, (self.now + delay_s, order, action))
        return order

    def _is_void(self, entry: tuple[float, int, Callable[[], None]]) -> bool:
        action = entry[2]
        return isinstance(action, _Timer) and self._timers.get(action.name) != entry[1]

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SetTimer(name=name, delay_s=delay_s) if name not in (TICK, STEPS):
                if name == JOIN and self.awaits_commit:
                    # The machine would set it again and again until the group has committed its first step.
                    delay_s = max(delay_s, self._boundary_s + COMMIT_DELAY_S - self.now)
                self._timers[name] = self._push(delay_s, _Timer(name, self._fire))
            case CancelTimer(name=name):
                self._timers.pop(name, None)
            case SendCommand(node=name, incarnation=incarnation, command=command):
                self._receive({name: incarnation}, command)
            case BroadcastCommand(receivers=receivers, command=command):
                self._receive(receivers, command)
            case BuildTemplates(profiled=profiled):
                job_id = profiled.job.job_id
                self._later(0.0, lambda: self._feed(TemplatesReady(at=self.now, cause=_CAUSE, job_id=job_id)))
            case ComputePlan() | CheckDrain() as question:
                self._later(self._parameters.plan_s, partial(self._answer_question, question))
            case CheckRestore() as request:
                self._later(0.0, lambda: self._feed(check_restore(request, self.now)))
            case FindCheckpoint(generation=generation):
                self._later(0.0, partial(self._find_checkpoint, generation))
            case _:
                pass  # Events, public state and durable state have no readers here.

    def _fire(self, name: str) -> None:
        self._timers.pop(name, None)
        self._feed(TimerFired(at=self.now, cause=_CAUSE, name=name))

    def _answer_question(self, question: ComputePlan | CheckDrain) -> None:
        self._feed(answer_question(question, self._job.planner, make_plan, lambda: self.now))

    def _find_checkpoint(self, generation: int) -> None:
        step = self._newest_checkpoint
        if self._plan is not None:
            state_bytes, step_s = self._job.state_bytes, self._plan.estimated_iteration_s
            every = self._parameters.checkpoint_steps(state_bytes, step_s)
            writing = math.ceil(self._parameters.checkpoint_write_s(state_bytes) / step_s)
            step = self._newest_checkpoint = max(step, (self._step - writing) // every * every)
        record = CheckpointRecord(step=step, vote=_VOTE, layers=self._layers)
        self._feed(
            CheckpointFound(
                at=self.now,
                cause=_CAUSE,
                generation=generation,
                checkpoint=record if step else None,
                skipped=(),
                reason="none was written yet",
            )
        )

    # --- commands ------------------------------------------------------------------------------------

    def _receive(self, receivers: Mapping[str, int], command: Command) -> None:
        """Let the addressed nodes that are there obey a command."""
        names = [
            name
            for name, incarnation in receivers.items()
            if name in self._nodes and self._nodes[name].incarnation == incarnation
        ]
        match command:
            case Prepare(job=job):
                answer = Prepared(job_id=job.job_id, profile=None)
                self._later(self._parameters.prepare_s, lambda: self._say_all(dict.fromkeys(names, answer)))
            case Quiesce(generation=generation, mode=mode):
                self._quiesce(names, generation, mode)
            case Resume():
                self._resume(names, command)
            case RequestHello():
                self._later(0.0, lambda: self._say_all(dict.fromkeys(names, self._hello())))
            case Fence():
                for name in names:
                    del self._nodes[name]
                self.add(names)
            case _:
                pass

    def _quiesce(self, names: list[str], generation: int, mode: QuiesceMode) -> None:
        self._resuming = None
        if mode == "abort" or not self._trains:
            self._note_state()
            self._trains = False
            self._later(self._parameters.quiesce_s, partial(self._report, names, generation))
            return
        assert self._plan is not None
        step_s = self._plan.estimated_iteration_s
        steps = max(0, math.ceil((self.now - self._boundary_s) / step_s))
        boundary_s = max(self._boundary_s + steps * step_s, self.now)
        self._later(boundary_s - self.now, partial(self._reach_boundary, names, generation, boundary_s))

    def _reach_boundary(self, names: list[str], generation: int, boundary_s: float) -> None:
        """Stop at the end of a step, unless another generation has begun meanwhile."""
        if generation != self._machine.generation or not self._trains:
            return
        self._boundary_s = boundary_s
        self._note_state()
        self._trains = False
        self._report(names, generation)

    def _report(self, names: list[str], generation: int) -> None:
        if generation != self._machine.generation:
            return
        signals: dict[str, Signal] = {}
        for name in names:
            node = self._nodes.get(name)
            if node is not None:
                signals[name] = Quiesced(
                    generation=generation,
                    reports=tuple(
                        DeviceReport(
                            device=device,
                            committed_step=node.step,
                            ready_step=None,
                            vote=_VOTE if node.step else None,
                            held=tuple(sorted(held)),
                            lineage=node.lineage,
                        )
                        for device, held in node.held.items()
                    ),
                )
        self._say_all(signals)

    def _resume(self, names: list[str], resume: Resume) -> None:
        """Form the group: its trainers meet, and then move state."""
        if self._resuming is not None and self._resuming.generation == resume.generation:
            return  # A repetition for a node that may not have received it.
        self._resuming, self._moving = resume, False
        self._later(self._parameters.rendezvous_s, partial(self._met, names, resume))

    def _met(self, names: list[str], resume: Resume) -> None:
        if self._resuming is not resume:
            return
        self._moving = True
        self._later(self._transfer_s(resume), partial(self._resumed, names, resume))

    def _transfer_s(self, resume: Resume) -> float:
        """Return the time in which the busiest device has its state.

        Virtual devices hold whole layers. Where a stage divides its state, each of its devices receives its part
        of them.
        """
        parameters, plan = self._parameters, resume.plan
        layers = self._job.profile.layers
        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        if resume.restore is not None:
            of_stages = [
                sum(layer.state_bytes for layer in layers[stage.first_layer : stage.end_layer])
                for stage in stages
            ]
            if resume.restore.url:
                return sum(of_stages) / parameters.storage_bytes_per_s
            of_devices = [size / stage.parts for size, stage in zip(of_stages, stages, strict=True)]
            return max(of_devices) / parameters.restore_bytes_per_s
        rate = parameters.transfer_bytes_per_s or self._job.profile.link.bytes_per_s
        return busiest_bytes(plan.transfers, plan.pipelines) / rate

    def _resumed(self, names: list[str], resume: Resume) -> None:
        """Let the group train, if all its nodes are there."""
        plan = resume.plan
        if self._resuming is not resume or any(name not in self._nodes for name in plan.nodes):
            return
        if resume.restore is not None or resume.step < self._step:
            self._rolled_back_to = resume.step
        owned = owned_layers(plan)
        self._owned = {
            name: {d: owned.get(Device(node=name, index=d), frozenset()) for d in self._devices}
            for name in plan.nodes
        }
        for name in names:
            node = self._nodes.get(name)
            if node is None:
                continue
            if node.step != resume.step or resume.restore is not None:
                node.held = dict.fromkeys(self._devices, frozenset())
            for device, layers in self._owned.get(name, {}).items():
                node.held[device] |= layers  # Old layers are kept until the first commit.
            node.step, node.lineage = resume.step, resume.lineage
        self._step = self._group_began = resume.step
        self._plan, self._resuming, self._trains = plan, None, True
        answer = Resumed(
            generation=resume.generation,
            bytes_moved=0,
            rendezvous_s=self._parameters.rendezvous_s,
            state_s=0.0,
        )
        self._boundary_s = self.now + plan.estimated_iteration_s
        self._say_all(dict.fromkeys(names, answer))


@dataclass(frozen=True, slots=True)
class _Timer:
    """A timer of the machine."""

    name: str
    fire: Callable[[str], None]

    def __call__(self) -> None:
        self.fire(self.name)
