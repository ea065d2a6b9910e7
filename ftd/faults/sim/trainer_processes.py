"""The trainer processes of a simulated host, as its daemon starts, instructs and ends them."""

import signal
from collections.abc import Callable, Sequence

from ftd.faults.sim.device_tests import SimDeviceTests
from ftd.faults.sim.host import SimHost
from ftd.faults.sim.process import ProcessLoop
from ftd.faults.sim.trainers import SimGroups, SimTrainer
from ftd.node.ports import TrainerObserver
from runtime.wire.zygote_protocol import Exited, Spawned, ZygoteNotice
from statemachine.messages.common import Quiesce
from statemachine.messages.trainer import (
    Attached,
    FlipBit,
    Instruction,
    PrepareJob,
    Raised,
    RaiseError,
    ResumeRank,
    RetainLocalSnapshot,
    Sleep,
    Slow,
    StartSnapshot,
    TrainerHeartbeat,
)
from statemachine.messages.values import FailureCause, PlantedFault

_FORK_S = (0.05, 0.3)
_BUILD_S = (0.3, 1.2)
_FRAME_S = (0.0005, 0.005)
_NOTICE_S = (0.001, 0.02)
"""Time until the daemon notices the end of a trainer."""
_FAILED = 1
"""Exit code of a trainer that fails."""


class SimTrainers:
    """The processes of a host: one of the daemon, its zygote and trainers (``ftd.node.ports.TrainerProcesses``
    and ``HostProcesses``).

    :param trainers: the running trainers of the host by device.
    :param signal_daemon: sends a signal to the daemon.
    """

    own_pid = 1
    zygote_pid: int | None = None

    def __init__(
        self,
        host: SimHost,
        groups: SimGroups,
        loop: ProcessLoop,
        trainers: dict[int, SimTrainer],
        signal_daemon: Callable[[int], None],
    ) -> None:
        self._host, self._groups, self._loop = host, groups, loop
        self._trainers, self._signal_daemon = trainers, signal_daemon
        self._by_pid: dict[int, SimTrainer] = {}
        self._device_tests = SimDeviceTests(host, loop, self._notify)
        self.observer: TrainerObserver
        """The observer of the daemon, from the start on."""

    async def start(self, observer: TrainerObserver) -> None:
        self.observer = observer
        self._host.world.call_later(self._host.world.timing.hang_check_s, self._send_heartbeats)

    async def close(self) -> None:
        """End all trainers."""
        self.kill_all()

    async def wait_until_warm(self) -> None:
        return

    def fork(self, device: int) -> None:
        world = self._host.world
        world.call_later(world.between(*_FORK_S), self._forked, device)

    def test_device(self, number: int, device: int, planted: PlantedFault) -> None:
        self._device_tests.begin(number, device, planted)

    def kill_all(self) -> None:
        """Kill all trainers and tests of devices, as the kernel does when their parent is dead."""
        self._device_tests.kill_all()
        for trainer in self._by_pid.values():
            trainer.die()
        self._by_pid.clear()
        self._trainers.clear()

    def signal_group(self, pid: int, number: int) -> None:
        self.signal(pid, number)

    def continue_later(self, pids: Sequence[int], for_s: float) -> None:
        for pid in pids:
            self._host.world.call_later(for_s, self.signal, pid, signal.SIGCONT)

    def reap(self, groups: set[int]) -> None:
        return

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the daemon, a trainer, or the test of a device, if there is such a process."""
        if pid == self.own_pid:
            self._signal_daemon(number)
            return
        trainer = self._by_pid.get(pid)
        if trainer is None:
            self._device_tests.kill(pid)
            return
        match number:
            case signal.SIGSTOP:
                trainer.frozen = True
            case signal.SIGCONT:
                trainer.wake()
            case _ if trainer.alive:  # A trainer does not handle SIGTERM.
                trainer.die()
                self._forget(trainer)
                self._exit(trainer, -number)

    def fail(self, trainer: SimTrainer, cause: FailureCause, words: str) -> None:
        """End a trainer process; the daemon notices a little later."""
        if not trainer.alive:
            return
        trainer.die()
        if cause == "raised":
            report = Raised(where="training", detail=words)
            self._host.world.call_later(self._notice_s(), self._raised, trainer, report)
        else:
            self._exit(trainer, _FAILED, words)

    def _raised(self, trainer: SimTrainer, report: Raised) -> None:
        trainer.report(report)
        self._exit(trainer, _FAILED)

    def _notify(self, notice: ZygoteNotice) -> None:
        self._loop.enter(self.observer.on_notice, notice)

    def _notice_s(self) -> float:
        return self._host.world.between(*_NOTICE_S)

    # --- what happens in processes -----------------------------------------------------------------

    def _forked(self, device: int) -> None:
        if not self._loop.alive:
            return
        host = self._host
        pid = host.world.next_serial()
        host.arena.retained.pop(device, None)
        host.arena.pinned.pop(device, None)
        trainer = self._by_pid[pid] = SimTrainer(host, self._groups, device, pid)
        self._trainers[device] = trainer
        self._loop.enter(self._attach, trainer)

    def _attach(self, trainer: SimTrainer) -> None:
        self.observer.on_notice(Spawned(device=trainer.device, pid=trainer.pid))
        self._loop.create_task(self._connect(trainer))

    async def _connect(self, trainer: SimTrainer) -> None:
        if trainer.alive:
            trainer.process = await self.observer.identify(Attached(device=trainer.device, pid=trainer.pid))
            self.observer.on_attached(trainer.process, _Connection(self._host, self, trainer))
            self._check_alone(trainer)

    def _check_alone(self, trainer: SimTrainer) -> None:
        """Check that the daemon has ended the device's earlier trainer."""
        for other in self._by_pid.values():
            if other is not trainer and other.alive and other.device == trainer.device and other.process:
                self._host.oracle.violated(f"{self._host.name}/{trainer.device} has two trainers")

    def _exit(self, trainer: SimTrainer, status: int, words: str = "") -> None:
        self._host.world.call_later(self._notice_s(), self._loop.enter, self._exited, trainer, status, words)

    def _exited(self, trainer: SimTrainer, status: int, words: str) -> None:
        if (process := trainer.process) is not None:
            self.observer.on_output(process, words.encode())
            process.output_ended.set()
        self.observer.on_notice(Exited(pid=trainer.pid, status=status))
        self._forget(trainer)

    def _forget(self, trainer: SimTrainer) -> None:
        self._by_pid.pop(trainer.pid, None)
        if self._trainers.get(trainer.device) is trainer:
            del self._trainers[trainer.device]

    def _send_heartbeats(self) -> None:
        """Let all trainers send the heartbeats of the last period as one, which is all that the agent uses of
        them.
        """
        if not self._loop.alive:
            return
        if not self._loop.frozen and self._trainers:
            self._loop.enter(self._heartbeats)
        self._host.world.call_later(self._host.world.timing.hang_check_s, self._send_heartbeats)

    def _heartbeats(self) -> None:
        for trainer in self._trainers.values():
            if trainer.alive and not trainer.frozen and trainer.process is not None:
                if not trainer.asleep:
                    trainer.progress += 1
                beat = TrainerHeartbeat(progress=trainer.progress, waiting=not trainer.asleep)
                self.observer.on_report(trainer.process, beat)

    # --- instructions ------------------------------------------------------------------------------

    def obey(self, trainer: SimTrainer, frame: Instruction) -> None:
        """Let a trainer obey an instruction that has arrived."""
        match frame:
            case PrepareJob():
                trainer.build(frame)
            case Quiesce(generation=generation, mode=mode):
                trainer.quiesce(generation, mode)
            case ResumeRank():
                trainer.resume(frame)
            case StartSnapshot(generation=generation, last=True):
                trainer.snap_last(generation)
            case StartSnapshot(generation=generation):
                trainer.snap(generation)
            case RetainLocalSnapshot(step=step, pinned=pinned) if trainer.alive:
                self._host.arena.retain(trainer.device, step, pinned)
            case Sleep():
                trainer.asleep = True
            case Slow(factor=factor):
                self._host.slowness = factor
            case RaiseError(detail=detail):
                self.fail(trainer, "raised", detail)
            case FlipBit():
                trainer.flip_bit()
            case _:
                pass  # Nobody traces simulated trainers, and repaired bytes are written by the storage.


class _Connection:
    """The connection to one trainer (``ftd.node.ports.TrainerConnection``)."""

    def __init__(self, host: SimHost, trainers: SimTrainers, trainer: SimTrainer) -> None:
        self._host, self._trainers, self._trainer = host, trainers, trainer

    def send(self, frame: Instruction) -> bool:
        world, trainer = self._host.world, self._trainer
        if not trainer.alive:
            return False
        took_s = world.between(*(_BUILD_S if isinstance(frame, PrepareJob) else _FRAME_S))
        world.call_later(took_s, trainer.do, self._trainers.obey, trainer, frame)
        return True
