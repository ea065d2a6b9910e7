"""The main thread's progress and waits, for other threads that monitor it.

The control thread sends ``progress``, ``waiting`` and ``reading`` with every heartbeat. Waiting for peers
is not a hang of this trainer. Standing still without waiting is: after a short time in a step, and after a
long time while samples are read. All waits of the training loop pass through ``wait``. It is the only place
where a stage is idle (a pipeline bubble), so idle time is measured there, and other work may run there.

A device may still be computing while the host already waits, so events on the device's stream measure a
bubble, and the host's clock does not. The host waits for a device only in ``waiting_for_device``. That is
neither a bubble nor a hang, because the device's own waits for peers have ended before.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from runtime.device import DeviceEvent, DeviceRuntime
from runtime.groups.communicator import Communicator, PendingOperation
from runtime.monitoring.tracing import TraceRecorder
from statemachine.messages.values import BuildProgress, BuildStage

StepWait = Literal["bubble", "gather", "sync", "vote"]
"""Reason for a wait in a step: a neighbour's activations or gradients, parameters on the stage's other
devices, sums of gradients, or all ranks.
"""
HostWait = Literal["bubble", "gather", "sync", "vote", "device"]
"""Reason for a wait of the host; ``device`` means that its own device computes or copies."""


class InjectedError(RuntimeError):
    """An injected error that stands for one in the user's code."""


class ProgressMonitor:
    """Progress, waits and injected faults of the main thread.

    The main thread writes and the control thread reads single attributes, which need no lock.
    """

    def __init__(self) -> None:
        self.progress = 0
        self.waiting = False
        self.reading = False
        """Whether samples are being read: user code that may wait much longer for a disk before it counts as
        hung.
        """
        self.build_progress: BuildProgress | None = None
        """Progress of the current preparation, for people who wait for it; ``None`` when the trainer is
        prepared.
        """
        self.bubble_s = 0.0
        """Time spent waiting for peers since ``begin_step``, as far as the device has got."""
        self.sync_s = 0.0
        """Part of ``bubble_s`` spent waiting for sums of gradients."""
        self.waiting_for: HostWait | None = None
        self.slowness = 1.0
        """Factor by which computing takes longer while the fault ``slow`` is injected."""
        self.injected_error = ""
        """Message of the injected error that computing raises once."""
        self.flip_requested = False
        """Whether the fault ``corrupt`` is injected: the engine flips a bit before its next step."""
        self.peer_wait: threading.Event | None = None
        """Event that is set while the main thread waits for peers, for threads that work only during such
        waits.
        """
        self.trace = TraceRecorder()
        self.runtime = DeviceRuntime()
        """The device that the main thread uses."""
        self._untimed: deque[tuple[StepWait | None, DeviceEvent, DeviceEvent]] = deque()
        """Waits whose ends the device has not reached."""
        self._sleep_s = 0.0

    def set_build_progress(self, stage: BuildStage | None, done: int = 0, total: int = 0) -> None:
        """Record the part of the preparation that begins, and how much of it is done.

        :param stage: ``None``: the preparation is over.
        """
        self.build_progress = None if stage is None else BuildProgress(stage=stage, done=done, total=total)
        self.tick()

    def begin_step(self) -> None:
        """Reset the measured waits at the beginning of a step."""
        self._untimed.clear()
        self.bubble_s = self.sync_s = 0.0

    def request_sleep(self, seconds: float) -> None:
        """Inject a fault: the main thread sleeps at its next operation."""
        self._sleep_s = seconds

    def tick(self) -> None:
        """Record progress at the beginning of an operation of the main thread."""
        self.progress += 1
        if self._sleep_s > 0:
            sleep_s, self._sleep_s = self._sleep_s, 0.0
            time.sleep(sleep_s)

    def raise_injected_error(self) -> None:
        """Raise an injected error once, if there is one.

        :raises InjectedError: an error was injected.
        """
        if self.injected_error:
            detail, self.injected_error = self.injected_error, ""
            raise InjectedError(detail)

    @contextmanager
    def reading_data(self) -> Iterator[None]:
        """Set ``reading`` within this context."""
        self.reading = True
        try:
            yield
        finally:
            self.reading = False
            self.progress += 1

    @contextmanager
    def idle(self, what: StepWait | None = None) -> Iterator[None]:
        """Record that the main thread only waits for others within this context.
        :param what: reason, if it is part of a step.
        """
        self.waiting, self.waiting_for = True, what
        if self.peer_wait is not None:
            self.peer_wait.set()
        began, ended = self.runtime.event(), self.runtime.event()
        began.record()
        began_s = time.time()
        try:
            yield
        finally:
            if what is not None:
                self.trace.add(what, began_s, time.time())
            ended.record()
            self._untimed.append((what, began, ended))
            self.account_bubbles()
            self.waiting, self.waiting_for = False, None
            if self.peer_wait is not None:
                self.peer_wait.clear()
            self.progress += 1

    def account_bubbles(self) -> None:
        """Add the waits that the device has completed to ``bubble_s`` and ``sync_s``, without waiting.

        Call this after a VOTE, too, when the device has completed all of them.
        """
        while self._untimed and self._untimed[0][2].done():
            what, began, ended = self._untimed.popleft()
            took_s = 1e-3 * ended.ms_since(began)
            self.bubble_s += took_s
            self.sync_s += took_s if what == "sync" else 0.0

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Record that the host waits for its own device within this context; this is no bubble because the
        device computes.
        """
        self.waiting, self.waiting_for = True, "device"
        try:
            yield
        finally:
            self.waiting, self.waiting_for = False, None
            self.progress += 1

    def read_values(self, tensor: Tensor) -> Any:
        """Return a tensor's numbers as (nested) lists once the device has computed them."""
        with self.waiting_for_device():
            return self.runtime.values(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor in host memory once the device has computed it; a tensor that is there already is
        returned itself.
        """
        with self.waiting_for_device():
            return self.runtime.to_host(tensor)

    def wait(
        self, communicator: Communicator, pending: PendingOperation, what: StepWait | None = None
    ) -> None:
        """Call ``communicator.wait``, and account for the time as idle if it has to wait."""
        if pending.is_complete():
            communicator.wait(pending)
            return
        with self.idle(what):
            communicator.wait(pending)

    def wait_any(self, communicator: Communicator, pendings: Sequence[PendingOperation]) -> None:
        with self.idle():
            communicator.wait_any(pendings)
