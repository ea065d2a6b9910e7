"""A trainer's connection to its node, and the mailbox between its control thread and its main thread.

The control thread reads instructions, sends heartbeats, and aborts communication as soon as a Quiesce
arrives, whatever the main thread is doing. The main thread takes instructions one by one when it is idle.
"""

import os
import select
import socket
import threading
import time
from collections import deque

from runtime.groups.communicator import CommunicationAborted, Communicator
from runtime.monitoring.progress import ProgressMonitor
from runtime.snapshots.writer import SnapshotWriter
from runtime.wire.frames import Decoder, encode
from statemachine.messages.common import Quiesce
from statemachine.messages.trace import Trace
from statemachine.messages.trainer import (
    Attached,
    Exit,
    FlipBit,
    Instruction,
    PrepareJob,
    RaiseError,
    RepairWrite,
    Report,
    ResumeRank,
    RetainLocalSnapshot,
    Sleep,
    Slow,
    StartSnapshot,
    TrainerHeartbeat,
)

HEARTBEAT_S = 0.05


class Mailbox:
    """The instructions for the main thread. The newest generation supersedes all older ones."""

    def __init__(self, monitor: ProgressMonitor) -> None:
        self._monitor = monitor
        self._condition = threading.Condition()
        self._prepares: deque[PrepareJob] = deque()
        self._quiesce: Quiesce | None = None
        self._resume: ResumeRank | None = None
        self._generation = 0
        """The highest generation of any instruction received."""
        self._resumed = 0
        """The highest generation of which the main thread took a Resume."""
        self._abort = False
        """Whether an abort has arrived that the main thread has not answered, even if a newer Quiesce replaced
        it.
        """
        self._communicator: Communicator | None = None
        self._snap = 0
        """Generation in which a snapshot was ordered; 0 if none is."""
        self._last_snap: StartSnapshot | None = None
        """The order of the snapshot after the last step."""
        self.snapshots: SnapshotWriter | None = None
        """Writer that gets each order to retain a snapshot, and each repair write, on the control thread."""

    # --- control thread --------------------------------------------------------------------------

    def deliver(self, instruction: Instruction) -> None:
        """Execute an instruction that needs no main thread, and store any other for it."""
        with self._condition:
            match instruction:
                case PrepareJob():
                    self._prepares.append(instruction)
                case Sleep(seconds=seconds):
                    self._monitor.request_sleep(seconds)
                case Slow(factor=factor):
                    self._monitor.slowness = factor
                case RaiseError(detail=detail):
                    self._monitor.injected_error = detail
                case FlipBit():
                    self._monitor.flip_requested = True
                case ResumeRank(generation=generation):
                    if generation >= self._generation:
                        self._generation = generation
                        self._resume = instruction
                case Quiesce():
                    self._deliver_quiesce(instruction)
                case StartSnapshot(generation=generation, last=True):
                    self._last_snap = instruction
                case StartSnapshot(generation=generation):
                    self._snap = generation
                case RetainLocalSnapshot(step=step, pinned=pinned):
                    if self.snapshots is not None:
                        self.snapshots.retain(step, pinned)
                case RepairWrite():
                    if self.snapshots is not None:
                        self.snapshots.write_repair(instruction)
                case Trace():
                    self._monitor.trace.request(instruction)
                case Exit():
                    os._exit(0)
            self._condition.notify_all()

    def _deliver_quiesce(self, quiesce: Quiesce) -> None:
        if quiesce.generation < self._generation or quiesce.generation <= self._resumed:
            return  # A newer one has arrived, or this generation is already training.
        self._generation = quiesce.generation
        self._quiesce = quiesce
        self._resume = None
        if quiesce.mode == "abort":
            self._abort = True
            if self._communicator is not None:
                self._communicator.abort()

    # --- main thread -----------------------------------------------------------------------------

    def next(self) -> PrepareJob | Quiesce | ResumeRank | StartSnapshot:
        """Wait for the next instruction and return it."""
        while True:
            with self._condition:
                if self._prepares:
                    return self._prepares.popleft()
                if self._quiesce is not None:
                    quiesce, self._quiesce, self._abort = self._quiesce, None, False
                    return quiesce
                if self._resume is not None:
                    resume, self._resume = self._resume, None
                    self._resumed = resume.generation
                    return resume
                if self._last_snap is not None:
                    snap, self._last_snap = self._last_snap, None
                    if snap.generation == self._resumed:
                        return snap
                with self._monitor.idle():
                    self._condition.wait()
            self._monitor.tick()  # An injected fault may sleep here, so this is outside of the lock.

    def attach(self, communicator: Communicator) -> None:
        """Make later aborts reach ``communicator``.

        :raises CommunicationAborted: an abort has already arrived.
        """
        with self._condition:
            self._communicator = communicator
            if self._abort:
                communicator.abort()
                raise CommunicationAborted

    @property
    def stop_requested(self) -> bool:
        """Whether a Quiesce waits to be answered; in boundary mode the vote carries this to all ranks."""
        return self._quiesce is not None

    def take_snapshot_order(self) -> bool:
        """Return whether a snapshot was ordered in the training generation, and clear the order; called once
        per step.
        """
        with self._condition:
            wanted = self._snap == self._resumed
            if wanted:
                self._snap = 0
        return wanted


class NodeConnection:
    """The unix socket to the node daemon. A trainer ends when it loses this connection."""

    def __init__(self, path: str, device: int, mailbox: Mailbox, monitor: ProgressMonitor) -> None:
        """Connect and start the control thread.

        :raises OSError: nothing listens at ``path``.
        """
        self._mailbox = mailbox
        self._monitor = monitor
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self.send(Attached(device=device, pid=os.getpid()))
        threading.Thread(target=self._control, name="control", daemon=True).start()

    def send(self, report: Report) -> None:
        """Send a report; any thread may call this. The process ends if the daemon is gone."""
        try:
            with self._lock:
                self._socket.sendall(encode(report))
        except OSError:
            os._exit(0)

    def _control(self) -> None:
        try:
            self._serve()
        except OSError:
            os._exit(0)
        except BaseException as error:
            # A trainer without its control thread could not be stopped, so it ends with a reason.
            os.write(2, f"control thread: {type(error).__name__}: {error}\n".encode())
            os._exit(3)

    def _serve(self) -> None:
        decoder: Decoder[Instruction] = Decoder(Instruction)
        beat_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + HEARTBEAT_S
                pace = self._monitor
                self.send(
                    TrainerHeartbeat(
                        progress=pace.progress,
                        waiting=pace.waiting,
                        reading=pace.reading,
                        build_progress=pace.build_progress,
                    )
                )
            readable, _, _ = select.select([self._socket], [], [], max(0.0, beat_at - now))
            if not readable:
                continue
            data = self._socket.recv(1024 * 1024)
            if not data:
                os._exit(0)
            for instruction in decoder.feed(data):
                self._mailbox.deliver(instruction)
