"""A simulated host: the real agent machine, its timers, and its trainer processes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import assert_never, cast

from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.copy_sender import SimCopySender
from ftd.faults.sim.health_checks import SimHealthChecks
from ftd.faults.sim.host import SimHost, StepTiming
from ftd.faults.sim.network import SimNetwork
from ftd.faults.sim.restorer import SimRestorer
from ftd.faults.sim.scrubber import SimScrubber
from ftd.faults.sim.trainers import SimGroups, SimTrainer
from ftd.faults.sim.writer import SimWriter
from statemachine.agent.events import (
    AgentStarted,
    CommandArrived,
    SnapshotsFound,
    TerminationRequested,
    TrainerConnected,
    TrainerFailed,
    TrainerReported,
)
from statemachine.agent.machine import AgentEvent, AgentMachine
from statemachine.effects import (
    CancelTimer,
    Effect,
    EmitEvent,
    ExitDaemon,
    InstructTrainer,
    KillTrainer,
    PersistLayers,
    PrepareTrainer,
    PublishNode,
    RemoveSnapshots,
    RenewIncarnation,
    ResumeTrainer,
    RetainSnapshotCopies,
    RunHealthCheck,
    SendSignal,
    SendSnapshotCopy,
    SetTimer,
    StartTrainer,
    StopHealthCheck,
    StopPersisting,
)
from statemachine.events import BrokerConnected, BrokerDisconnected, TimerFired
from statemachine.messages.cluster import Fence, FromNode, ToNode, ToNodes
from statemachine.messages.common import Prepared, Quiesce
from statemachine.messages.trainer import RetainLocalSnapshot, StartSnapshot, TrainerHeartbeat
from statemachine.messages.values import FailureCause, NodeFacts, NodeState

AgentEffect = (
    SetTimer | CancelTimer | EmitEvent | SendSignal | PublishNode | StartTrainer | KillTrainer
    | PrepareTrainer | InstructTrainer | ResumeTrainer | RemoveSnapshots
    | RenewIncarnation | ExitDaemon | SendSnapshotCopy | RetainSnapshotCopies | PersistLayers | StopPersisting
    | RunHealthCheck | StopHealthCheck
)  # fmt: skip


class SimNode(SimHost):
    """One host: a daemon that can be killed, stopped or cut off, and the trainers under it."""

    def __init__(
        self,
        groups: SimGroups,
        network: SimNetwork,
        checkpoint_store: SimCheckpointStore,
        nodes: Mapping[str, "SimNode"],
        name: str,
        devices: int,
        step_timing: StepTiming,
    ) -> None:
        super().__init__(groups.oracle, network, checkpoint_store, nodes, name, step_timing)
        self.groups, self.devices, self.profile = groups, devices, groups.oracle.profile
        self.incarnation = 0
        self.exited = False
        """Whether the daemon exited by itself."""
        self.removed_at: float | None = None
        """Time at which the host was removed for good."""
        self.failing_builds = 0
        """Number of the next builds that fail."""
        self.max_scan_s = 0.0
        """The longest extra time that a starting daemon needs to scan its memory."""
        self.trainers: dict[int, SimTrainer] = {}
        self.writer = SimWriter(self)
        self.health_checks = SimHealthChecks(self, devices)
        scrubber = self._scrubber()
        self.copy_sender = SimCopySender(self, scrubber)
        self.restorer = SimRestorer(self, scrubber)
        self._timers: dict[str, int] = {}
        self._starts: dict[int, int] = {}
        """Number of orders to start and to kill, by device."""
        self._backlog: list[AgentEvent] = []

    def _scrubber(self) -> SimScrubber:
        return SimScrubber(self)

    # --- the daemon ------------------------------------------------------------------------------

    def start(self) -> None:
        self.up, self.exited, self.frozen = True, False, False
        self.arena.retained_copies = 0
        self.life += 1
        self._backlog.clear()
        self._timers.clear()
        self.agent = AgentMachine(self.name, self.world.timing)
        self._begin()

    def _begin(self) -> None:
        self.incarnation = self.world.next_serial()
        host = f"host-{self.name}"
        facts = NodeFacts(
            devices=self.devices,
            host=host,
            rendezvous_port=7000,
            snapshot_port=7001,
            checks_health=self.world.checks_health,
        )
        self.feed(AgentStarted(at=self.world.now, cause="start", incarnation=self.incarnation, facts=facts))
        self.network.register(self)
        looks_s = self.world.between(0.0, 0.5) + (
            self.world.between(0.0, self.max_scan_s) if self.max_scan_s else 0.0
        )
        self.world.call_later(looks_s, self._found, self.life)

    def _found(self, life: int) -> None:
        """Report the snapshots that the daemon found in its memory."""
        if self.life == life:
            held = self.arena.snapshots()
            self.feed(SnapshotsFound(at=self.world.now, cause="arena", snapshots=held))

    def crash(self, *, host: bool = False) -> None:
        """SIGKILL the daemon, with which its trainers die, or lose the whole host with its memory."""
        if host:
            self.arena.clear()
        if not self.up:
            return
        self._stop()
        self.network.drop(self.name, process_died=True)

    def _stop(self) -> None:
        self.up = self.frozen = False
        self.writer.stopped()
        self.life += 1
        self._backlog.clear()
        for device in self._starts:
            self._starts[device] += 1
        for trainer in self.trainers.values():
            trainer.die()
        self.trainers.clear()

    def freeze(self, for_s: float) -> None:
        """SIGSTOP the daemon: messages wait for it, and its timers are late."""
        if self.up and not self.frozen:
            self.frozen = True
            self.world.call_later(for_s, self.thaw, self.life)

    def thaw(self, life: int | None = None) -> None:
        if not self.frozen or (life is not None and life != self.life):
            return
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.feed(replace(event, at=self.world.now))  # It is read only now.

    def clear_faults(self) -> None:
        """Clear every fault of this host."""
        self.data_cut = False
        self.failing_builds = 0
        self.slowness = 1.0
        self.health_checks.planted = ""
        self.max_scan_s = self.restorer.max_read_s = self.copy_sender.max_send_s = 0.0
        self.thaw()

    def terminate(self) -> None:
        self.feed(TerminationRequested(at=self.world.now, cause="sigterm", reason="SIGTERM"))

    def feed(self, event: AgentEvent) -> None:
        if not self.up:
            return
        if self.frozen:
            self._backlog.append(event)
            return
        world = self.world
        if world.tracing:
            world.note(self.name, event)
        if isinstance(event, CommandArrived) and isinstance(event.message.command, Fence):
            self.oracle.on_fenced(self.name, event.message.incarnation)
        for effect in self.agent.step(event):
            if world.tracing:
                world.note(self.name, f"  → {effect}")
            self._perform(cast(AgentEffect, effect))

    def connected(self) -> None:
        self.feed(BrokerConnected(at=self.world.now, cause="broker"))

    def disconnected(self) -> None:
        self.feed(BrokerDisconnected(at=self.world.now, cause="broker"))

    def command(self, received: ToNode | ToNodes) -> None:
        message: ToNode | None
        if isinstance(received, ToNode):
            message = received
        else:
            message = received.addressed(self.name, self.incarnation)
            self.oracle.check_addressed(self.name, self.incarnation, received, taken=message is not None)
        if message is not None:
            self.feed(CommandArrived(at=self.world.now, cause=message.cause, message=message))

    # --- effects ---------------------------------------------------------------------------------

    def _perform(self, effect: AgentEffect) -> None:
        world = self.world
        match effect:
            case SetTimer():
                token = self._timers.get(effect.name, 0) + 1
                self._timers[effect.name] = token
                world.call_later(effect.delay_s, self._fire, effect.name, token, effect.cause, self.life)
            case CancelTimer():
                self._timers[effect.name] = self._timers.get(effect.name, 0) + 1
            case SendSignal():
                self.oracle.check_signal(self.name, self.incarnation)
                message = FromNode(node=self.name, incarnation=self.incarnation, signal=effect.signal)
                self.network.signal(message)
            case StartTrainer():
                start = self._starts[effect.device] = self._starts.get(effect.device, 0) + 1
                world.call_later(world.between(0.05, 0.3), self._trainer_up, effect.device, start)
            case KillTrainer():
                self._starts[effect.device] = self._starts.get(effect.device, 0) + 1
                trainer = self.trainers.pop(effect.device, None)
                if trainer is not None:
                    trainer.die()
            case PrepareTrainer():
                self._instruct(effect.device, self._prepare, effect, 0.3, 1.2)
            case InstructTrainer():
                self._instruct(effect.device, self._obey, effect, 0.0005, 0.005)
            case ResumeTrainer():
                staging = 0.4 if effect.resume.restore is not None else 0.0005
                self._instruct(effect.device, self.restorer.restore, effect, staging / 4, staging + 0.005)
            case SendSnapshotCopy() | RetainSnapshotCopies() | RemoveSnapshots():
                self.copy_sender.perform(effect)
            case PersistLayers() | StopPersisting():
                self.writer.perform(effect)
            case RunHealthCheck() | StopHealthCheck():
                self.health_checks.perform(effect)
            case PublishNode():
                self.network.retain(self.name, effect.state is NodeState.OFFLINE, self.incarnation)
            case RenewIncarnation():
                self.life += 1
                self._timers.clear()
                self.network.drop(self.name, process_died=True)
                self._begin()
            case ExitDaemon():
                self._stop()
                self.exited = True
                self.network.drop(self.name, process_died=True, graceful=True)
            case EmitEvent():
                pass
            case _:
                assert_never(effect)

    def _fire(self, name: str, token: int, cause: str, life: int) -> None:
        if self._timers.get(name) != token or life != self.life:
            return
        if name == "watch" and not self.frozen:
            self._beats()
        self.feed(TimerFired(at=self.world.now, cause=cause, name=name))

    def _beats(self) -> None:
        """Report the heartbeats since the last check as one per trainer, which is all that the agent uses of
        them.
        """
        now = self.world.now
        for trainer in self.trainers.values():
            if trainer.alive and not trainer.frozen:
                if not trainer.asleep:
                    trainer.progress += 1
                beat = TrainerHeartbeat(progress=trainer.progress, waiting=not trainer.asleep)
                self.feed(TrainerReported(at=now, cause="beat", device=trainer.device, report=beat))

    # --- trainer processes -------------------------------------------------------------------------

    def _instruct(
        self, device: int, action: Callable[..., None], effect: Effect, low_s: float, high_s: float
    ) -> None:
        trainer = self.trainers.get(device)
        if trainer is not None:
            self.world.call_later(self.world.between(low_s, high_s), trainer.do, action, trainer, effect)

    def _trainer_up(self, device: int, start: int) -> None:
        if not self.up or self._starts.get(device) != start:
            return
        pid = self.world.next_serial()
        self.arena.retained.pop(device, None)
        self.arena.pinned.pop(device, None)
        self.trainers[device] = SimTrainer(self, self.groups, device, pid)
        self.feed(TrainerConnected(at=self.world.now, cause="trainer", device=device, pid=pid))

    def _prepare(self, trainer: SimTrainer, effect: PrepareTrainer) -> None:
        if not trainer.responsive:
            return
        if self.failing_builds > 0:
            self.failing_builds -= 1
            self.fail_trainer(trainer.device, "unprepared")
            return
        sharded = effect.job.policy.zero1
        every = int(effect.job.training.get("evaluation_every_steps", 0))
        trainer.build(
            len(self.profile.layers),
            effect.job.steps,
            evaluate_every=every,
            compare_every=effect.job.compare_replicas_every,
            sharded=sharded,
        )
        trainer.report(Prepared(job_id=effect.job.job_id, profile=self.profile if effect.profile else None))

    def _obey(self, trainer: SimTrainer, effect: InstructTrainer) -> None:
        match effect.instruction:
            case Quiesce(generation=generation, mode=mode):
                trainer.quiesce(generation, mode)
            case StartSnapshot(generation=generation, last=True):
                trainer.snap_last(generation)
            case StartSnapshot(generation=generation):
                trainer.snap(generation)
            case RetainLocalSnapshot(step=step, pinned=pinned) if trainer.alive:
                self.arena.retain(trainer.device, step, pinned)

    def fail_trainer(self, device: int, cause: FailureCause, words: str = "") -> None:
        """End a trainer process; the daemon notices a little later."""
        trainer = self.trainers.get(device)
        if trainer is None or not trainer.alive:
            return
        trainer.die()
        words = words or f"simulated in {trainer.pid}"
        self.world.call_later(self.world.between(0.001, 0.02), self._failed, trainer, cause, words)

    def _failed(self, trainer: SimTrainer, cause: FailureCause, words: str) -> None:
        if self.trainers.get(trainer.device) is not trainer:
            return
        self.feed(
            TrainerFailed(
                at=self.world.now,
                cause="trainer",
                device=trainer.device,
                pid=trainer.pid,
                cause_of_failure=cause,
                detail=words,
            )
        )
