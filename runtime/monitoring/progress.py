"""How far the main thread is, for those who watch it from other threads.

The control thread sends ``progress``, ``waiting`` and ``reading`` with every beat. Waiting for peers is not a
hang of this trainer; standing still without waiting is, soon in a step and late while samples are read. All
waits of the training loop pass through ``wait``: it is the one place where a stage is idle (a pipeline
bubble), which is where time is accounted, and where other work may be done.

A device may still compute while the host waits already, so events on its stream time a bubble, and not the host's
clock. The host never waits for a device outside of ``waiting_for_device``: that is no bubble, and no hang
either, since the
device's own waits for peers are waited for here first.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from runtime.device import DeviceRuntime, Event, HostRuntime
from runtime.groups.communicator import Communicator, PendingOperation
from runtime.monitoring.tracing import TraceRecorder

StepWait = Literal["bubble", "gather", "sync", "vote"]
"""What a step waits for: a neighbour's activations or gradients, the stage's other devices' parameters, sums of
gradients, everybody."""
HostWait = Literal["bubble", "gather", "sync", "vote", "device"]
"""``waiting_for_device``: the host waits for what its own device computes or copies."""


class InjectedError(RuntimeError):
    """Chaos: what the user's code might have raised."""


class ProgressMonitor:
    """Written by the main thread, read by the control thread; single attributes need no lock."""

    def __init__(self) -> None:
        self.progress = 0
        self.waiting = False
        self.reading = False
        """Samples of the data set: user code that may wait for a disk, which is no hang for much longer."""
        self.build_progress = ""
        """What is done before the trainer is prepared, for people who wait for it."""
        self.bubble_s = 0.0
        """Waited for peers since ``begin_step``, as far as the device has come."""
        self.sync_s = 0.0
        """Of that, for sums of gradients."""
        self.waiting_for: HostWait | None = None
        self.slowness = 1.0
        """Chaos: computing takes so many times as long."""
        self.raises = ""
        """Chaos: computing raises once, with these words."""
        self.peer_wait: threading.Event | None = None
        """Set while ``waiting`` for peers, for who has work for such times."""
        self.trace = TraceRecorder()
        self.runtime: DeviceRuntime = HostRuntime()
        """The device that the main thread gives work to."""
        self._untimed: deque[tuple[StepWait | None, Event, Event]] = deque()
        """Waits whose ends the device has not come to."""
        self._sleep_s = 0.0

    def set_build_progress(self, build_progress: str) -> None:
        """A part of the preparation begins. :param doing: in words; empty: it is over."""
        self.build_progress = build_progress
        self.tick()

    def begin_step(self) -> None:
        """Waits are counted from here on."""
        self._untimed.clear()
        self.bubble_s = self.sync_s = 0.0

    def request_sleep(self, seconds: float) -> None:
        """Chaos: have the main thread stand still at its next operation."""
        self._sleep_s = seconds

    def tick(self) -> None:
        """The main thread begins another operation."""
        self.progress += 1
        if self._sleep_s > 0:
            sleep_s, self._sleep_s = self._sleep_s, 0.0
            time.sleep(sleep_s)

    def raise_injected_error(self) -> None:
        """:raises InjectedError: chaos wants it; once."""
        if self.raises:
            detail, self.raises = self.raises, ""
            raise InjectedError(detail)

    @contextmanager
    def reading_data(self) -> Iterator[None]:
        """The data set is asked for samples."""
        self.reading = True
        try:
            yield
        finally:
            self.reading = False
            self.progress += 1

    @contextmanager
    def idle(self, what: StepWait | None = None) -> Iterator[None]:
        """Nothing to do but wait for others. :param what: for the trace, where it is part of a step."""
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
        """Add the waits that the device has come through to ``bubble_s`` and ``sync_s``; does not wait.

        To be called after a VOTE, too: the device has come through all of them then.
        """
        while self._untimed and self._untimed[0][2].done():
            what, began, ended = self._untimed.popleft()
            took_s = 1e-3 * ended.ms_since(began)
            self.bubble_s += took_s
            self.sync_s += took_s if what == "sync" else 0.0

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """The host waits for its own device: no bubble, as the device computes."""
        self.waiting, self.waiting_for = True, "device"
        try:
            yield
        finally:
            self.waiting, self.waiting_for = False, None
            self.progress += 1

    def read_values(self, tensor: Tensor) -> Any:
        """Return a tensor's numbers as (nested) lists, when the device has computed them."""
        with self.waiting_for_device():
            return self.runtime.values(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor in host memory, when the device has computed it; itself, where it is there."""
        with self.waiting_for_device():
            return self.runtime.to_host(tensor)

    def wait(
        self, communicator: Communicator, pending: PendingOperation, what: StepWait | None = None
    ) -> None:
        """``communicator.wait``, as idle time where it has to wait."""
        if pending.is_complete():
            communicator.wait(pending)
            return
        with self.idle(what):
            communicator.wait(pending)

    def wait_any(self, communicator: Communicator, pendings: Sequence[PendingOperation]) -> None:
        with self.idle():
            communicator.wait_any(pendings)
