"""The supervisor of the trainers of one host: it has them forked, sends them frames, and ends each with its
whole process group.

The supervisor handles processes and frames and decides nothing. The agent machine decides what to start,
send and end, and receives every fact about a trainer as an event. A trainer that was ended on request
reports no failure. Its successor may start before it has quite ended, so processes are identified by pid
and never by device alone. ``ftd.node.trainer_processes`` has the zygote and the unix socket.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from ftd.config.daemon import DaemonConfig
from ftd.node.health import HealthChecker
from ftd.node.ports import Ports, TrainerConnection, TrainerProcess
from ftd.tasks import cancel_all, start_task
from ftd.transport.wire.profiles import problem_of_profile
from planner.values import ModelProfile
from runtime.parent import exit_sentence
from runtime.wire import zygote_protocol
from runtime.wire.frames import ProtocolError
from statemachine.agent.events import HealthCheckEnded, TrainerConnected, TrainerFailed, TrainerReported
from statemachine.events import Event
from statemachine.messages import trainer as protocol
from statemachine.messages.common import Prepared
from statemachine.messages.trace import Traced
from statemachine.messages.values import FailureCause

log = structlog.get_logger()

OUTPUT_TAIL_BYTES = 8192
ATTACH_TIMEOUT_S = 30.0
"""Limit from the fork to the trainer's first frame. The forked process has torch already, so this is generous."""
_OUTPUT_TIMEOUT_S = 0.05
"""Time that a failure report waits for the rest of a dead trainer's output."""
_CLOSED_BUT_ALIVE_S = 1.0
_ORPHANS_S = 1.0
"""Time after which the processes that a dead trainer left have ended, too."""
_CAUSES: dict[str, FailureCause] = {"prepare": "unprepared", "restore": "foreign", "training": "raised"}
"""Cause of the failure of a trainer whose code raised, by where it raised."""


class TrainerSupervisor:
    """The supervisor of this node's trainers: it starts them, sends them frames and ends them.

    :param feed: receives every event, in the order in which things happened.
    :param stamp: returns the fields ``at`` and ``cause`` of an event that nobody asked for.
    :param on_side_report: receives the reports that are not for the machine.
    """

    def __init__(
        self,
        config: DaemonConfig,
        ports: Ports,
        *,
        feed: Callable[[Event], None],
        stamp: Callable[[], dict[str, Any]],
        on_side_report: Callable[[int, protocol.DaemonReport], None],
    ) -> None:
        self._host, self._processes = ports.processes, ports.trainers
        self._feed, self._stamp = feed, stamp
        self._on_side_report = on_side_report
        self._current: dict[int, TrainerProcess] = {}
        self._unforked: dict[int, list[TrainerProcess]] = {device: [] for device in range(config.devices)}
        self._by_pid: dict[int, TrainerProcess] = {}
        self._fork_notices: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = False
        self.health = HealthChecker(
            config,
            ports,
            on_checked=lambda report: feed(HealthCheckEnded(**stamp(), report=report)),
        )
        """Health checks, whose processes the same zygote forks."""

    async def start(self) -> None:
        """Listen for trainers and start the zygote; return before torch is imported."""
        await self._processes.start(self)

    async def close(self) -> None:
        """End every trainer and the zygote, at once except for trainers in their grace period."""
        if self._ending:
            await asyncio.wait(tuple(self._ending))
        self._closing = True
        self.health.stop()
        for trainer in [*self._by_pid.values(), *self._current.values()]:
            self._end(trainer, grace_s=0.0)
        await self._processes.close()
        await cancel_all(self._tasks)

    # --- requests of the agent machine -----------------------------------------------------------

    def start_trainer(self, device: int) -> None:
        """Fork a trainer for ``device``; ``TrainerConnected`` or ``TrainerFailed`` follows."""
        if device in self._current:
            self.kill_trainer(device, grace_s=0.0)
        trainer = TrainerProcess(device=device)
        self._current[device] = trainer
        self._unforked[device].append(trainer)
        self._processes.fork(device)
        self._run(self._expect_attachment(trainer))

    def kill_trainer(self, device: int, grace_s: float) -> None:
        """End the process group of the device's trainer; no event follows."""
        trainer = self._current.pop(device, None)
        if trainer is not None:
            self._end(trainer, grace_s)

    def send(self, device: int, frame: protocol.Instruction) -> bool:
        """Send a frame to the device's trainer and return whether there is one.

        If there is none, the frame is lost; the trainer's failure is, or will be, an event.
        """
        trainer = self._current.get(device)
        if trainer is None or trainer.connection is None or not trainer.connection.send(frame):
            log.info("frame_without_trainer", device=device, frame=type(frame).__name__)
            return False
        return True

    def fail_trainer(self, device: int, cause: FailureCause, detail: str) -> None:
        """Report the device's trainer as failed for a reason found here, such as a job that cannot be encoded."""
        trainer = self._current.get(device)
        if trainer is not None:
            self.fail(trainer, cause, detail)

    def pids(self, device: int | None = None) -> list[int]:
        """Return the leaders of the process groups of one device's trainer or of all trainers."""
        return [t.pid for t in self._current.values() if t.pid is not None and device in (None, t.device)]

    # --- the zygote ------------------------------------------------------------------------------

    def on_notice(self, notice: zygote_protocol.ZygoteNotice) -> None:
        """Take a notice of the zygote."""
        match notice:
            case zygote_protocol.ZygoteReady():
                log.info("zygote_warm", pid=notice.pid, import_s=round(notice.import_s, 3))
            case zygote_protocol.Spawned():
                self._spawned(notice)
            case zygote_protocol.NotForked(check=None):
                self._not_forked(notice)
            case zygote_protocol.NotForked():
                self.health.on_not_forked(notice)
            case zygote_protocol.DeviceCheckBegan():
                self.health.on_began(notice)
            case zygote_protocol.DeviceChecked():
                self.health.on_completed(notice)
            case zygote_protocol.Exited():
                if not self.health.on_exited(notice.pid, exit_sentence(notice.status)) and (
                    notice.pid in self._by_pid
                ):
                    self._run(self._exited(self._by_pid[notice.pid], notice))

    def _spawned(self, notice: zygote_protocol.Spawned) -> None:
        if not self._unforked.get(notice.device):
            self._host.signal_group(notice.pid, signal.SIGKILL)
            return
        trainer = self._unforked[notice.device].pop(0)
        trainer.pid = notice.pid
        self._by_pid[notice.pid] = trainer
        if notice.pid in self._fork_notices:
            self._fork_notices.pop(notice.pid).set()
        if trainer.retired:  # It was ended before it was forked.
            self._host.signal_group(notice.pid, signal.SIGKILL)

    def _not_forked(self, notice: zygote_protocol.NotForked) -> None:
        if self._unforked.get(notice.device):
            trainer = self._unforked[notice.device].pop(0)
            trainer.exited.set()
            remedy = (
                "free memory on this host, or allow it more processes (ulimit -u, pids.max of the cgroup)"
            )
            self.fail(trainer, "exited", f"it could not be forked: {notice.reason}; {remedy}")

    async def _exited(self, trainer: TrainerProcess, notice: zygote_protocol.Exited) -> None:
        trainer.exited.set()
        self._host.signal_group(
            notice.pid, signal.SIGKILL
        )  # Child processes of the trainer must not outlive it.
        self._reap_later({notice.pid})
        if not trainer.retired:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(trainer.output_ended.wait(), _OUTPUT_TIMEOUT_S)
            self.fail(trainer, "exited", exit_sentence(notice.status))
        self._by_pid.pop(notice.pid, None)

    def on_zygote_end(self, status: int, detail: str) -> None:
        """Report the zygote's trainers as failed: they die with it, and nobody will report their exit status."""
        if self._closing:
            return
        log.warning("zygote_ended", status=status, detail=detail)
        lost = [*self._by_pid.values(), *(t for unforked in self._unforked.values() for t in unforked)]
        self._reap_later({*self._by_pid, *self.health.pids})
        self._by_pid.clear()
        for unforked in self._unforked.values():
            unforked.clear()
        self.health.on_zygote_end()
        for trainer in lost:
            trainer.exited.set()
            if trainer.pid is not None:
                self._host.signal_group(trainer.pid, signal.SIGKILL)
            if not trainer.retired:
                self.fail(
                    trainer, "exited", f"the zygote that forked it ended ({exit_sentence(status)}) {detail}"
                )

    def _reap_later(self, groups: set[int]) -> None:
        """Collect the exit status of what these processes left, since this daemon adopts it: dead processes count
        towards the limits of the host until then.
        """
        asyncio.get_running_loop().call_later(_ORPHANS_S, self._host.reap, groups)

    # --- the trainers ----------------------------------------------------------------------------

    async def identify(self, greeting: protocol.FirstFrame) -> TrainerProcess:
        """Return the trainer that sent the first frame of a connection.

        :raises ProtocolError: it is no trainer of this node.
        """
        trainer = await self._forked_trainer(greeting.pid)
        if trainer is None or trainer.device != greeting.device:
            raise ProtocolError(f"process {greeting.pid} is not a trainer of this node")
        return trainer

    async def _forked_trainer(self, pid: int) -> TrainerProcess | None:
        """Return the trainer of this pid; it may connect before the zygote's notice of the fork is read."""
        if pid not in self._by_pid:
            forked = self._fork_notices.setdefault(pid, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(forked.wait(), ATTACH_TIMEOUT_S)
        return self._by_pid.get(pid)

    def on_attached(self, trainer: TrainerProcess, connection: TrainerConnection) -> None:
        """Note that the trainer can receive instructions, unless it was ended before it connected."""
        if trainer.retired:
            return
        trainer.connection = connection
        assert trainer.pid is not None, "it was identified by its pid"
        self._feed(TrainerConnected(**self._stamp(), device=trainer.device, pid=trainer.pid))

    async def on_closed(self, trainer: TrainerProcess) -> None:
        """Take the end of a trainer's connection, which its exit should follow."""
        try:
            await asyncio.wait_for(trainer.exited.wait(), _CLOSED_BUT_ALIVE_S)
        except TimeoutError:
            self.fail(trainer, "exited", "it closed its connection but did not exit")

    def on_report(self, trainer: TrainerProcess, frame: protocol.Report) -> None:
        """Take a frame of a trainer."""
        if trainer.retired:
            return
        match frame:
            case protocol.Attached():
                self.fail(trainer, "exited", "its frames are malformed: it attached twice")
            case protocol.Raised():
                self.fail(trainer, _CAUSES[frame.where], frame.detail)
            case Traced() | protocol.StagingCorrupted() | protocol.ModelDescribed():
                self._on_side_report(trainer.device, frame)
            case Prepared(profile=ModelProfile() as profile) if problem := problem_of_profile(profile):
                detail = f"the model was measured, but the profile's {problem}"
                self.fail(trainer, "unprepared", detail)
            case _:
                self._feed(TrainerReported(**self._stamp(), device=trainer.device, report=frame))

    def on_output(self, trainer: TrainerProcess, data: bytes) -> None:
        """Keep the tail of the trainer's output."""
        trainer.output += data
        del trainer.output[:-OUTPUT_TAIL_BYTES]

    async def _expect_attachment(self, trainer: TrainerProcess) -> None:
        await self._processes.wait_until_warm()
        await asyncio.sleep(ATTACH_TIMEOUT_S)
        if trainer.connection is None and not trainer.retired:
            self.fail(trainer, "exited", f"it did not connect within {ATTACH_TIMEOUT_S:g} s of its start")

    def fail(self, trainer: TrainerProcess, cause: FailureCause, what: str) -> None:
        """Report this trainer as failed, and make sure that it ends."""
        if trainer.retired:
            return
        if self._current.get(trainer.device) is trainer:
            del self._current[trainer.device]
        output = trainer.output.decode("utf-8", errors="replace").strip()
        detail = f"{what}\n{output}" if output and cause == "exited" else what
        log.error("trainer_failed", device=trainer.device, pid=trainer.pid, failure=cause, detail=detail)
        self._end(trainer, grace_s=0.0)
        self._feed(
            TrainerFailed(
                **self._stamp(),
                device=trainer.device,
                pid=trainer.pid or 0,
                cause_of_failure=cause,
                detail=detail[-OUTPUT_TAIL_BYTES:],
            )
        )

    def _end(self, trainer: TrainerProcess, grace_s: float) -> None:
        trainer.retired = True
        if trainer.pid is None or trainer.exited.is_set():
            return
        if grace_s <= 0 or self._closing:
            self._host.signal_group(trainer.pid, signal.SIGKILL)
            return
        self._host.signal_group(trainer.pid, signal.SIGTERM)
        self._host.signal_group(
            trainer.pid, signal.SIGCONT
        )  # A stopped process would never handle the SIGTERM.
        start_task(self._kill_after(trainer, trainer.pid, grace_s), self._ending)

    async def _kill_after(self, trainer: TrainerProcess, pid: int, grace_s: float) -> None:
        try:
            await asyncio.wait_for(trainer.exited.wait(), grace_s)
        except TimeoutError:
            self._host.signal_group(pid, signal.SIGKILL)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        start_task(work, self._tasks)
