"""Fault injection on request: a node causes to itself the fault that a client asks for over MQTT.

The node rejects every request, with an answer and an event, unless its configuration says ``chaos = true``.
It announces a fault before it injects it: the event ``ChaosInjected`` carries the moment of the fault. The
broker acknowledges that event first, so even SIGKILL of this process is on record with its exact time.
"""

import asyncio
import hashlib
import signal
from pathlib import Path
from typing import Any, Protocol, assert_never

import structlog

from ftd.config.daemon import DaemonConfig
from ftd.faults.chaos.values import DEFAULT_FOR_S
from ftd.node.full_disk import DiskFiller
from ftd.node.message_faults import LinkFaults, MessageFaultInjector
from ftd.node.ports import Ports
from ftd.node.supervisor import TrainerSupervisor
from ftd.snapshots.service import SnapshotService
from ftd.tasks import start_task
from ftd.transport.wire.public import Answer, ChaosRequest, decode_json
from statemachine.messages.trainer import FlipBit, RaiseError, Sleep, Slow

log = structlog.get_logger()

NOTICE_S = 0.02
"""Time from the announcement to the fault. An acknowledged publication takes well under a millisecond on
mosquitto, and a recovery can be measured from a moment that is known beforehand.
"""
ANNOUNCE_TIMEOUT_S = 1.0
_REMEMBERED = 100
"""Number of answered requests that are remembered, so that a repeated request is not executed a second time."""
DEFAULT_HANG_S = 3600.0
DEFAULT_FACTOR = 3.0
MAX_FACTOR = 1000.0
MAX_LATE_S = 60.0


class FaultActions(Protocol):
    """Actions of fault injection on this node, implemented by the daemon."""

    def leave(self, reason: str) -> None:
        """Leave gracefully, as after SIGTERM."""

    def disconnect(self, for_s: float) -> None:
        """Cut the connection to the broker without a disconnect message, and reconnect after ``for_s``."""

    def publish_event(self, event: str, reason: str, details: dict[str, Any]) -> None:
        """Publish an event."""

    def send_answer(self, client: str, answer: Answer) -> None: ...

    async def flush(self, timeout_s: float) -> None:
        """Return when the broker has acknowledged everything published, or after ``timeout_s``."""


class NodeFaultInjector:
    """The server of the requests on the topic ``chaos/<node>``, which it checks, executes and answers."""

    def __init__(
        self,
        config: DaemonConfig,
        ports: Ports,
        *,
        actions: FaultActions,
        supervisor: TrainerSupervisor,
        memory: SnapshotService,
    ) -> None:
        self._node, self._devices, self._allowed = config.node, config.devices, config.chaos
        self._actions, self._supervisor, self._memory = actions, supervisor, memory
        self._processes, self._trainers, self._clock = ports.processes, ports.trainers, ports.clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: dict[str, Answer] = {}
        self.message_faults = MessageFaultInjector(config.node)
        """Faults on the messages between this node and the coordinator."""
        self._filler = DiskFiller()
        self._slowed: dict[int, int] = {}
        """Number of times that each device's trainer was slowed. The end of an earlier fault must not end a
        later one.
        """

    def on_request(self, payload: bytes) -> None:
        """Check the request, answer it, and inject the fault.

        :raises WireError: the payload is no chaos request, so nobody can be answered.
        """
        request: ChaosRequest = decode_json(payload, ChaosRequest)
        if (known := self._answered.get(request.request)) is not None:
            self._actions.send_answer(
                request.reply, known
            )  # The client asked again: the first answer was lost or late.
            return
        problem = self._lasting_problem(request)
        if request.dry_run:
            self._answer(request, accepted=problem is None, detail=problem or "this fault can be injected")
            return
        problem = problem or self._present_problem(request)
        if problem is not None:
            log.warning("chaos_rejected", do=request.do, reason=problem)
            self._actions.publish_event("ChaosRejected", problem, {"fault": request.do})
            self._answer(request, accepted=False, detail=problem)
            return
        start_task(self._inject(request, at=self._announce(request)), self._tasks)

    def _lasting_problem(self, request: ChaosRequest) -> str | None:
        """Return a reason to reject the request that will still hold in a minute, or ``None``."""
        if not self._allowed:
            return (
                f"chaos is off on {self._node}; set chaos = true under [node] in its ftd.toml "
                "and restart the daemon to allow it"
            )
        if request.device is not None and not 0 <= request.device < self._devices:
            return f"{self._node} has devices 0 to {self._devices - 1}, not {request.device}"
        if request.for_s is not None and not 0 < request.for_s < float("inf"):
            return f"for_s is {request.for_s:g}; give a positive number of seconds"
        if request.factor is not None and not 1 <= request.factor <= MAX_FACTOR:
            return f"factor is {request.factor:g}; give 1 (full speed) to {MAX_FACTOR:g} (that many times slower)"
        if request.do == "lossy":
            return _link_faults_problem(request)
        if (
            request.do in ("fill_memory", "fill_disk")
            and request.size_mib is not None
            and request.size_mib < 1
        ):
            return f"size_mib is {request.size_mib}; give 1 or more"
        if request.do == "fill_memory":
            return self._filler.find_problem(self._memory.memory_directory, request.size_mib)
        return None

    def _present_problem(self, request: ChaosRequest) -> str | None:
        """Return a reason to reject the request that holds now, or ``None``."""
        if (
            request.do in ("kill", "stop", "hang", "raise", "slow", "corrupt")
            and not _whole_node(request)
            and not self._pids(request)
        ):
            return f"{self._node} does not run such a trainer now"
        if request.do == "fill_disk":
            if (directory := self._fillable(request)) is None:
                return f"{self._node} writes no checkpoints into a directory now"
            return self._filler.find_problem(directory, request.size_mib)
        if request.do == "flip" and not self._memory.has_snapshot_data(request.device):
            return f"{self._node} holds no part of a snapshot that is complete everywhere now"
        return None

    def _announce(self, request: ChaosRequest) -> float:
        """Publish the fault, answer the request, so that a repeated one is not served again, and return the moment
        of the fault.
        """
        at = self._clock.monotonic_s() + NOTICE_S
        whole = _whole_node(request)
        details = {
            "fault": request.do,
            "at": at,
            "target": "node" if whole else "trainer",
            "device": None if whole else request.device,
            "for_s": request.for_s,
        }
        if request.do == "slow":
            details["factor"] = request.factor or DEFAULT_FACTOR
        for name in ("size_mib", "drop", "duplicate", "late_s", "how"):
            if (value := getattr(request, name)) is not None:
                details[name] = value
        log.warning("chaos_injected", **details)
        self._actions.publish_event(
            "ChaosInjected", f"{_describe(request)}, requested by {request.reply}", details
        )
        self._answer(request, accepted=True, detail=f"{request.do} {self._node}")
        return at

    async def _inject(self, request: ChaosRequest, *, at: float) -> None:
        await self._actions.flush(ANNOUNCE_TIMEOUT_S)
        await asyncio.sleep(max(0.0, at - self._clock.monotonic_s()))
        self._do(request)

    def _do(self, request: ChaosRequest) -> None:
        for_s = request.for_s or DEFAULT_FOR_S.get(request.do, 0.0)
        match request.do:
            case "kill":
                for pid in self._pids(request):
                    self._processes.signal_group(pid, signal.SIGKILL)
                if _whole_node(request):
                    if (zygote := self._trainers.zygote_pid) is not None:
                        self._processes.signal_group(zygote, signal.SIGKILL)
                    self._processes.signal(self._processes.own_pid, signal.SIGKILL)
            case "stop":
                self._stop(request)
            case "hang":
                for device in self._target_devices(request):
                    self._supervisor.send(device, Sleep(seconds=request.for_s or DEFAULT_HANG_S))
            case "slow":
                self._slow(request)
            case "term":
                self._actions.leave("ftd chaos term")
            case "flip":
                self._memory.flip_bit(request.device)
            case "corrupt":
                for device in self._target_devices(request):
                    self._supervisor.send(device, FlipBit())
            case "bad_device":
                devices = self._target_devices(request)
                self._supervisor.health.plant(request.how or "wrong", devices, for_s)
            case "disconnect":
                self._actions.disconnect(for_s)
            case "raise":
                words = f"ftd chaos raise {request.request} ({request.reply}) {_mark(request.request)}"
                for device in self._target_devices(request):
                    self._supervisor.send(device, RaiseError(detail=words))
            case "lossy":
                self.message_faults.begin(_link_faults(request), seed=request.seed, for_s=for_s)
            case "fill_memory" | "fill_disk":
                if (directory := self._fillable(request)) is not None:
                    self._filler.fill(directory, for_s)
            case _:
                assert_never(request.do)

    def _stop(self, request: ChaosRequest) -> None:
        """Stop the processes by SIGSTOP. If the request has a duration, they continue after it."""
        pids = self._pids(request)
        if _whole_node(request):
            pids += [pid for pid in (self._trainers.zygote_pid, self._processes.own_pid) if pid is not None]
        if request.for_s is not None:
            self._processes.continue_later(pids, request.for_s)
        for pid in pids:  # This process stops last.
            self._processes.signal(pid, signal.SIGSTOP)

    def _slow(self, request: ChaosRequest) -> None:
        """Slow the trainers down. A trainer that is started again meanwhile runs at full speed."""
        for device in self._target_devices(request):
            number = self._slowed[device] = self._slowed.get(device, 0) + 1
            self._supervisor.send(device, Slow(factor=request.factor or DEFAULT_FACTOR))
            if request.for_s is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(request.for_s, self._end_slow, device, number)

    def _end_slow(self, device: int, number: int) -> None:
        if self._slowed.get(device) == number:
            self._supervisor.send(device, Slow(factor=1.0))

    def _fillable(self, request: ChaosRequest) -> Path | None:
        """Return the directory that a ``fill_memory`` or ``fill_disk`` request fills."""
        if request.do == "fill_memory":
            return self._memory.memory_directory
        return self._memory.checkpoint_directory

    def close(self) -> None:
        """Release the memory and disk space that was filled."""
        self._filler.close()

    def _target_devices(self, request: ChaosRequest) -> tuple[int, ...]:
        return tuple(range(self._devices)) if request.device is None else (request.device,)

    def _pids(self, request: ChaosRequest) -> list[int]:
        return self._supervisor.pids(None if _whole_node(request) else request.device)

    def _answer(self, request: ChaosRequest, *, accepted: bool, detail: str) -> None:
        answer = Answer(request=request.request, accepted=accepted, detail=detail)
        self._answered[request.request] = answer
        while len(self._answered) > _REMEMBERED:
            del self._answered[next(iter(self._answered))]
        self._actions.send_answer(request.reply, answer)


def _link_faults(request: ChaosRequest) -> LinkFaults:
    return LinkFaults(
        drop=request.drop or 0.0, duplicate=request.duplicate or 0.0, late_s=request.late_s or 0.0
    )


def _link_faults_problem(request: ChaosRequest) -> str | None:
    for name in ("drop", "duplicate"):
        if not 0 <= (value := getattr(request, name) or 0.0) <= 1:
            return f"{name} is {value:g}; a probability is 0 to 1"
    late_s = request.late_s or 0.0
    if not 0 <= late_s <= MAX_LATE_S:
        return f"late_s is {late_s:g}; give 0 to {MAX_LATE_S:g} seconds"
    return None if request.drop or request.duplicate or late_s else "give drop, duplicate or late_s"


def _whole_node(request: ChaosRequest) -> bool:
    """Return whether the fault hits the daemon as well; ``term`` and ``disconnect`` always do."""
    match request.do:
        case "kill" | "stop":
            return request.target == "node"
        case "hang" | "raise" | "slow" | "flip" | "corrupt" | "bad_device":
            return False
        case "term" | "disconnect" | "lossy" | "fill_memory" | "fill_disk":
            return True


def _describe(request: ChaosRequest) -> str:
    """Return a label such as ``kill: the node`` or ``slow: trainer 1, for 20 s``."""
    target = "its trainers" if request.device is None else f"trainer {request.device}"
    label = f"{request.do.replace('_', ' ')}: {'the node' if _whole_node(request) else target}"
    return label if request.for_s is None else f"{label}, for {request.for_s:g} s"


def _mark(request: str) -> str:
    """Return letters that differ for each request.

    Errors that differ in numbers at most count as the same error of the job's own code, and clients may number
    their requests.
    """
    digest = hashlib.sha256(request.encode()).hexdigest()[:8]
    return digest.translate(str.maketrans("0123456789", "ghijklmnop"))
