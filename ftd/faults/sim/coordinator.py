"""A simulated coordinator: the real cluster machine, its journal, and the real planner."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, assert_never, cast

from ftd.faults.sim.checkpoints import EXPORT_S, CheckpointWork
from ftd.faults.sim.disk import Copy, Disk
from ftd.faults.sim.forgotten import forgets
from ftd.faults.sim.losses import Written
from ftd.faults.sim.network import Network
from ftd.faults.sim.planning import PlanningWork
from ftd.faults.sim.seat import SimSeat
from ftd.faults.sim.succession import begins
from ftd.faults.sim.voice import Voice
from ftd.faults.sim.world import World
from statemachine.cluster.durable.durable import unseen
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.cluster.machine import ClusterEvent, ClusterMachine
from statemachine.effects import (
    AbandonCheckpoint,
    AnswerRequest,
    BroadcastCommand,
    BuildTemplates,
    CancelTemplates,
    CancelTimer,
    CheckRestore,
    CommitCheckpoint,
    ComputePlan,
    Effect,
    EmitEvent,
    ExportCheckpoint,
    FindCheckpoint,
    ForeseePlan,
    ForgetNode,
    PersistState,
    PublishCluster,
    RecordSteps,
    SendCommand,
    SetTimer,
    WeighPlan,
)
from statemachine.events import (
    BrokerConnected,
    BrokerLost,
    DrainRequested,
    JobSubmitted,
    NodeVanished,
    SignalArrived,
    SnapshotRequested,
    StepsMissed,
    StopRequested,
    TimerFired,
)
from statemachine.messages.cluster import FromNode, ToNode, ToNodes
from statemachine.messages.values import Checkpoint, Job

if TYPE_CHECKING:
    from ftd.faults.sim.invariants import Invariants

ClusterEffect = (
    SetTimer | CancelTimer | EmitEvent | SendCommand | BroadcastCommand | PersistState | PublishCluster
    | BuildTemplates | CancelTemplates | ComputePlan | WeighPlan | CheckRestore | CommitCheckpoint | ExportCheckpoint
    | AbandonCheckpoint | FindCheckpoint | AnswerRequest | ForeseePlan | ForgetNode
    | RecordSteps
)  # fmt: skip


class SimCoordinator(CheckpointWork, PlanningWork):
    """A coordinator's process: what it knows is lost when it is killed, except for its journal."""

    def __init__(self, world: World, network: Network, invariants: "Invariants", name: str) -> None:
        self.world, self.network, self.invariants, self.name = world, network, invariants, name
        self.incarnation = 0
        self.up = False
        self.frozen = False
        self.machine = ClusterMachine(world.timing)
        self.disk = Disk()
        self.unread: Copy | None = None
        """The newest journal that it was ever sent and could not read."""
        self.leading = False
        self.crash_after: int | None = None
        """Effects until it is killed in the middle of carrying them out."""
        self.on_event: Any = None
        """Called with each public event's name."""
        self._life = 0
        self._timers: dict[str, int] = {}
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.voice = Voice(self)
        self._waiting: list[ClusterEvent] = []
        self._haste = Random(f"{world.seed} together")
        """Of its own: in a quarter of all seeds it is busy at times, and takes what came together."""
        self._busy = world.seed % 4 == 3
        self._quiet = Random(f"{world.seed} quiet")
        self.seat = SimSeat(self, world, network)

    # --- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        self.up, self.frozen, self.leading = True, False, False
        self._life += 1
        self._waiting = []
        self._timers.clear()
        self._backlog.clear()
        self.crash_after = None
        self.planner = None
        self.incarnation = self.world.serial()
        self.voice = Voice(self)
        self.machine = ClusterMachine(self.world.timing)
        self.seat = SimSeat(self, self.world, self.network)
        self.network.watch(self.seat)

    # --- who leads ---------------------------------------------------------------------------------

    def begin_reign(self, copy: Copy | None) -> None:
        """From the newest of what the last leader left at the broker and what is on the own disk."""
        self._life += 1
        self._waiting = []
        self._timers.clear()
        self.voice.clear()
        self.planner = None
        journal, position, written_s = self.disk.journal, self.disk.position, self.disk.written_s
        if copy is not None and copy.position > position:
            journal, position, written_s = copy.journal, copy.position, copy.clock_s
            if not self.disk.reads(copy):
                self.invariants.broken(f"{self.name} begins to lead from a journal that it cannot read")
        effects: list[Effect] = []
        if journal is None:
            self.machine = ClusterMachine(self.world.timing)
        else:
            plain = json.loads(json.dumps(journal))
            if self.disk.shared and (copy is None or copy.position < self.disk.position):
                plain = unseen(plain)
            plain, now = self.disk.begin(plain, written_s), self.world.now + self.disk.clock_s
            self.machine, effects = ClusterMachine.restore(self.world.timing, plain, now, "restart")
        self.leading = True
        if self.network.has_seat(self.seat):  # Else it stood still, another one leads, and nobody hears it.
            begins(self.invariants, self.network, self, position, Written(self.machine))
            self.invariants.coordinator_starts(self.machine)
        if journal is not None:
            self.voice.go_on(journal)
        self._perform_all(effects)

    def reconnected(self) -> None:
        """The seat is ours: what was to be told is told, then everybody is heard."""
        self.voice.tell_waiting()
        self.feed(BrokerConnected(at=self.world.now, cause="broker"))
        # All that others told: the most that it may have missed.
        self.feed(StepsMissed(at=self.world.now, cause="broker", first=1, last=2**53))

    def end_reign(self) -> None:
        self.leading = False
        self._life += 1
        self._waiting = []
        self._timers.clear()
        self.voice.clear()
        self.machine = ClusterMachine(self.world.timing)

    def replicate(self) -> None:
        """The journal, at the broker and on the disk. What is at the broker counts."""
        parts = {**self.machine.durable_parts(), OUTBOX: self.voice.outbox.entries}
        copy = self.disk.write(self.seat.machine.term, parts, self._quiet)
        self.network.from_seat(self.seat, self._replicated, copy, Written(self.machine))

    def _replicated(self, copy: Copy, view: Written) -> None:
        self.network.replicate(copy)
        self.invariants.replicated = max(self.invariants.replicated, copy.position)
        self.invariants.persisted(view)
        self.invariants.telling.decided(copy)

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Now, or where the process is stopped, when it goes on."""
        if self.frozen:
            self._backlog.append((action, arguments))
        elif self.up:
            action(*arguments)

    # --- the process, again ------------------------------------------------------------------------

    def crash(self) -> None:
        """SIGKILL: only the journal is left."""
        if not self.up:
            return
        self.up = self.frozen = False
        self._life += 1
        self._waiting = []
        self._backlog.clear()
        self.leading = False
        self.network.drop(self.name, process_died=True)

    def freeze(self, for_s: float) -> None:
        if self.up and not self.frozen:
            self.frozen = True
            self.world.at(for_s, self.thaw, self._life)

    def thaw(self, life: int | None = None) -> None:
        if not self.frozen or (life is not None and life != self._life):
            return
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self.do(action, *arguments)

    def feed(self, event: ClusterEvent) -> None:
        """It counts where this coordinator leads, as far as it knows."""
        if self.leading:
            self.do(self._feed, event, self._life)

    def _feed(self, event: ClusterEvent, life: int) -> None:
        if life != self._life:
            return
        if isinstance(event, TimerFired) or not self._busy or self._haste.random() < 0.7:
            self._take([*self._waiting, event])
        else:
            if not self._waiting:
                self.world.at(self._haste.uniform(0.0, 0.05), self.do, self._take_waiting, life)
            self._waiting.append(event)

    def _take_waiting(self, life: int) -> None:
        if life == self._life:
            self._take(self._waiting)

    def _take(self, events: list[ClusterEvent]) -> None:
        """As the driver does: together, but a timer alone, since what came before it may cancel it."""
        self._waiting = []
        alone: list[ClusterEvent] = []
        for event in events:
            if isinstance(event, TimerFired):
                self._step(alone)
                self._step([event])
                alone = []
            else:
                alone.append(event)
        self._step(alone)

    def _step(self, events: list[ClusterEvent]) -> None:
        if not events or not self.leading:
            return
        if self.world.tracing:
            for event in events:
                self.world.note("coord", event)
        now = self.world.now + self.disk.clock_s
        effects = self.machine.steps([replace(event, at=now) for event in events])
        self._perform_all(effects)
        if self.network.hears(self.seat):
            # What a coordinator knew that died before it journaled it, or was deposed, was never known.
            self.invariants.coordinator_stepped(self.machine)

    def disconnected(self) -> None:
        self.feed(BrokerLost(at=self.world.now, cause="broker"))

    def signal(self, message: FromNode) -> None:
        cause = f"{message.node}@{self.world.events}"
        self.feed(SignalArrived(at=self.world.now, cause=cause, message=message))

    def will(self, node: str, incarnation: int, graceful: bool) -> None:
        event = NodeVanished(
            at=self.world.now, cause=f"will-{node}", node=node, incarnation=incarnation, graceful=graceful
        )
        self.feed(event)

    def submit(self, job: Job, begin: Checkpoint | None) -> None:
        self.feed(JobSubmitted(at=self.world.now, cause="submit", request=job.job_id, job=job, begin=begin))

    def drain(self, node: str) -> None:
        self.feed(DrainRequested(at=self.world.now, cause="drain", request="drain", node=node))

    def ask_snapshots(self, **wants: Any) -> None:
        self.feed(SnapshotRequested(at=self.world.now, cause="ask", request="ask", **wants))

    def stop(self, job: str) -> None:
        self.feed(StopRequested(at=self.world.now, cause="stop", request="stop", job=job))

    # --- effects -----------------------------------------------------------------------------------

    def _perform_all(self, effects: list[Effect]) -> None:
        world = self.world
        self.voice.decide(effects)
        for effect in effects:
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    self.crash()
                    world.at(world.between(0.1, 6.0), self.restart)
                    return
            if world.tracing:
                world.note("coord", f"  → {effect}")
            if isinstance(effect, PersistState) and self.out_of_room():
                return
            self._perform(cast(ClusterEffect, effect))

    def out_of_room(self) -> bool:
        """What cannot be journaled must not be acted on: the process ends."""
        if self.world.now >= self.disk.full_until:
            return False
        self.crash()
        self.world.at(self.world.between(0.1, 2.0), self.restart)
        return True

    def restart(self) -> None:
        if not self.up:
            self.start()

    def _perform(self, effect: ClusterEffect) -> None:
        world = self.world
        match effect:
            case SendCommand() | BroadcastCommand():
                self.network.from_seat(self.seat, self._command, effect.message)
            case ForgetNode():
                self.network.from_seat(self.seat, forgets, self.invariants, self.network, effect.node)
            case PersistState():
                self.replicate()
            case EmitEvent():
                self.voice.tell(effect)
            case SetTimer():
                token = self._timers.get(effect.name, 0) + 1
                self._timers[effect.name] = token
                world.at(effect.delay_s, self._fire, effect.name, token, effect.cause, self._life)
            case CancelTimer():
                self._timers[effect.name] = self._timers.get(effect.name, 0) + 1
            case BuildTemplates() | ComputePlan() | WeighPlan() | CheckRestore():
                self._reckon(effect)
            case CommitCheckpoint():
                world.at(world.between(0.001, 0.2), self._commit, effect, self._life)
            case AbandonCheckpoint():
                world.at(world.between(0.2, 0.3), self._abandon, effect, self._life)
            case ExportCheckpoint():
                world.at(EXPORT_S, self._export, effect, self._life)
            case FindCheckpoint():
                world.at(world.between(0.001, 0.2), self._find, effect, self._life)
            case RecordSteps():
                self.invariants.recalled(effect)
            case PublishCluster() | AnswerRequest() | CancelTemplates() | ForeseePlan():
                pass
            case _:
                assert_never(effect)

    def _command(self, message: ToNode | ToNodes) -> None:
        """At the broker, at once for all whom it is for."""
        copy = self.network.retained.journal
        self.invariants.commands(message.command, copy.journal if copy is not None else None)
        if isinstance(message, ToNode):
            self.network.command(message)
        else:
            self.network.broadcast(message)

    def _fire(self, name: str, token: int, cause: str, life: int) -> None:
        if life == self._life and self._timers.get(name) == token:
            self.feed(TimerFired(at=self.world.now, cause=cause, name=name))


def leader_of(network: Network, coordinators: Sequence[SimCoordinator]) -> SimCoordinator:
    """The one that leads; or that did, as far as it knows."""
    if network.seat is not None:
        return network.seat.coordinator
    return max(coordinators, key=lambda one: (one.leading, one.up, one.disk.position))
