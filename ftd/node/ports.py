"""The interfaces between a node and its environment, as small protocols.

The daemon (``ftd.node.daemon``) implements them with the system's clocks, MQTT, a zygote with a unix
socket, and files in memory; the simulator (``ftd.faults.sim``) with virtual time and memory. Everything
else runs on the current asyncio event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftd.driver import Clock
from ftd.snapshots.ports import SnapshotStorage
from ftd.transport.mqtt.session import ignore
from ftd.transport.ports import OpenSession
from runtime.wire import zygote_protocol
from statemachine.effects import EmitEvent
from statemachine.messages import trainer as protocol
from statemachine.messages.values import FailureCause, NodeFacts, PlantedFault


class HostProcesses(Protocol):
    """The processes of this host."""

    @property
    def own_pid(self) -> int:
        """Process id of this daemon."""

    def signal_group(self, pid: int, number: int) -> None:
        """Send a signal to a process group, if it still exists."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to one process, if it still exists."""

    def continue_later(self, pids: Sequence[int], for_s: float) -> None:
        """Continue these processes (SIGCONT) after ``for_s``, even if this daemon is one of them."""

    def reap(self, groups: set[int]) -> None:
        """Collect the exit status of the dead children that this daemon has in these process groups, now and
        whenever it is called again.
        """


class TrainerConnection(Protocol):
    """The connection to a trainer that has attached."""

    def send(self, frame: protocol.Instruction) -> bool:
        """Send a frame and return whether the connection is open."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrainerProcess:
    """One trainer process, from the request to fork it until its exit is known."""

    device: int
    pid: int | None = None
    """Process id; ``None`` until the zygote has forked it."""
    connection: TrainerConnection | None = None
    output: bytearray = field(default_factory=bytearray)
    output_ended: asyncio.Event = field(default_factory=asyncio.Event)
    retired: bool = False
    """Whether the end of the process was requested or reported; its further frames are ignored."""
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class TrainerObserver(Protocol):
    """The receiver of facts about a node's zygote and trainer processes; implemented by the supervisor."""

    def on_notice(self, notice: zygote_protocol.ZygoteNotice) -> None:
        """Take a notice of the zygote. The notices of one zygote keep their order."""

    def on_zygote_end(self, status: int, detail: str) -> None:
        """Take the end of the zygote, with which its trainers die."""

    async def identify(self, greeting: protocol.FirstFrame) -> TrainerProcess:
        """Return the trainer that sent the first frame of a connection.

        :raises ProtocolError: it is no trainer of this node.
        """

    def on_attached(self, trainer: TrainerProcess, connection: TrainerConnection) -> None:
        """Note that the trainer can receive instructions."""

    def on_report(self, trainer: TrainerProcess, frame: protocol.Report) -> None:
        """Take a frame of a trainer."""

    async def on_closed(self, trainer: TrainerProcess) -> None:
        """Take the end of a trainer's connection."""

    def on_output(self, trainer: TrainerProcess, data: bytes) -> None:
        """Take bytes that the trainer printed."""

    def fail(self, trainer: TrainerProcess, cause: FailureCause, what: str) -> None:
        """Report this trainer as failed, and make sure that it ends."""


class TrainerProcesses(Protocol):
    """The zygote, and the trainers and tests of devices that it forks. They report to a ``TrainerObserver``."""

    @property
    def zygote_pid(self) -> int | None: ...

    async def start(self, observer: TrainerObserver) -> None:
        """Listen for trainers and start the zygote; return before torch is imported."""

    async def close(self) -> None:
        """End the zygote, and with it all trainers, and stop listening."""

    async def wait_until_warm(self) -> None:
        """Return once trainers are forked without delay."""

    def fork(self, device: int) -> None:
        """Fork a trainer. A notice follows, and then its connection."""

    def test_device(self, number: int, device: int, planted: PlantedFault) -> None:
        """Fork a process that tests a device, as a part of the health check with this number. Notices follow:
        that it began, its result if it has one, and its exit.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObserver:
    """Callbacks for metrics and the monitor of starved trainers, which observe a node and decide nothing."""

    on_event: Callable[[EmitEvent], None] = ignore
    """Callback for an event of this node, before the rate limiter may drop it."""
    on_acknowledged: Callable[[float], None] = ignore
    """Callback for the seconds that the broker took for a message."""
    on_heartbeat: Callable[[int, float], None] = ignore
    """Callback for a heartbeat of a device's trainer, and the time at which it arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All ports of one node process."""

    clock: Clock
    open_session: OpenSession
    processes: HostProcesses
    trainers: TrainerProcesses
    snapshots: SnapshotStorage
    facts: Callable[[], NodeFacts]
    """Function that returns what the node reports about itself; called when an incarnation begins."""
    observer: NodeObserver
