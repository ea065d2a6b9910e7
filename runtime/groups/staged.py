"""gloo for devices other than CPUs: their tensors travel through pinned host memory.

This is slower than NCCL but makes no demands on the devices: several trainers may share one, and nodes with
and without devices may train together. A tensor to send is copied to the host on a separate stream, after
the operation that computes it. A thread waits for that copy and only then passes the bytes to gloo.
Received bytes are copied to the device on another stream, and the operation is complete when they are
there, so a caller that has waited needs no event. An abort frees the main thread at once, as with host
memory: it never waits for a device.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from runtime.device import DeviceEvent, DeviceRuntime
from runtime.groups.communicator import Channel, CommunicationAborted, Members, PendingOperation
from runtime.groups.gloo import GlooCommunicator
from runtime.groups.store import Rendezvous

Copies = Sequence[tuple[Tensor, Tensor]]
"""Sources and targets."""
_Request = tuple[DeviceEvent, Copies, Callable[[], PendingOperation], Callable[[BaseException | None], None]]
"""Event after which the copies are on the host, the copies, the gloo operation that follows, and its
completion handler.
"""


class StagedGlooCommunicator(GlooCommunicator):
    """A communicator over gloo for tensors on a device.
    :param runtime: the runtime of that device.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        host: str,
        runtime: DeviceRuntime,
        **options: float,
    ) -> None:
        super().__init__(rendezvous, rank, size, host, **options)
        self._runtime = runtime
        self._down, self._up = runtime.stream(), runtime.stream()
        self._handlers: dict[PendingOperation, Callable[[BaseException | None], None]] = {}
        """Completion handlers by gloo's operation; the condition guards them."""
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        threading.Thread(target=self._issue_in_order, name="communication-stage", daemon=True).start()

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        [staged] = self._host_memory(tensor)
        ask = super().send
        return self._stage([(tensor, staged)], [], lambda: ask(staged, peer, channel))

    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        [staged] = self._host_memory(tensor)
        ask = super().receive
        return self._stage([], [(staged, tensor)], lambda: ask(staged, peer, channel))

    def all_reduce(self, tensor: Tensor, members: Members) -> PendingOperation:
        if len(members) == 1:
            return super().all_reduce(tensor, members)
        [staged] = self._host_memory(tensor)
        ask = super().all_reduce
        return self._stage([(tensor, staged)], [(staged, tensor)], lambda: ask(staged, members))

    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        return self._exchange(super().all_gather, target, source, members)

    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        return self._exchange(super().reduce_scatter, target, source, members)

    def close(self) -> None:
        self._close_stores()
        self._requests.put(None)

    # --- helpers -------------------------------------------------------------------------------------

    def _host_memory(self, *tensors: Tensor) -> list[Tensor]:
        return [self._runtime.pinned(t.numel(), t.dtype).view(t.shape) for t in tensors]

    def _exchange(
        self,
        ask: Callable[[Tensor, Tensor, Members], PendingOperation],
        target: Tensor,
        source: Tensor,
        members: Members,
    ) -> PendingOperation:
        there, here = self._host_memory(target, source)
        return self._stage([(source, here)], [(there, target)], lambda: ask(there, here, members))

    def _stage(self, down: Copies, up: Copies, ask: Callable[[], PendingOperation]) -> PendingOperation:
        """Copy ``down``, then start the gloo operation, then copy ``up``."""
        self.check()
        pending = PendingOperation()
        given, copied = self._runtime.event(), self._runtime.event()
        given.record()
        with self._runtime.on(self._down):
            self._down.wait(given)
            _copy(down)
            copied.record()

        def finish(error: BaseException | None) -> None:
            if error is None and self._aborted:
                # The target may be in use for something else by now. Nobody may take it for the result.
                error = CommunicationAborted()
            if error is None:
                try:
                    self._copy_up(up, given)
                except RuntimeError as failed:
                    error = failed
            super(StagedGlooCommunicator, self)._finish(pending, error)

        self._requests.put((copied, down, ask, finish))
        return pending

    def _copy_up(self, up: Copies, given: DeviceEvent) -> None:
        """Copy received bytes to the device, where earlier work may use the targets until ``given``."""
        if up:
            there = self._runtime.event()
            with self._runtime.on(self._up):
                self._up.wait(given)
                _copy(up)
                there.record()
            there.synchronize()

    def _issue_in_order(self) -> None:
        """Pass operations to gloo in the order in which the main thread posted them."""
        self._runtime.prepare_thread()
        while (request := self._requests.get()) is not None:
            # The sources of the copies stay alive until the copies are done; otherwise their memory could
            # be reused.
            copied, _down, ask, finish = request
            try:
                copied.synchronize()
                pending = ask()
            except RuntimeError as error:
                finish(error)
            else:
                with self._condition:
                    is_done = pending.done
                    if not is_done:
                        self._handlers[pending] = finish
                if is_done:
                    finish(pending.error)
                del pending
            del request, copied, _down, ask, finish
        super().close()

    def _finish(self, pending: PendingOperation, error: BaseException | None) -> None:
        with self._condition:
            handler = self._handlers.pop(pending, None)
            if handler is None:
                super()._finish(pending, error)
        if handler is not None:
            handler(error)


def _copy(copies: Copies) -> None:
    with torch.no_grad():
        for source, target in copies:
            target.copy_(source, non_blocking=True)
