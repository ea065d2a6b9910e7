"""gloo for devices that are no CPU: they compute, and their tensors travel through pinned host memory.

Slower than NCCL, but it asks nothing of the devices: several trainers may share one, and nodes with and without
them may train together. What is sent goes down to the host on a stream of its own, after what computes it; a
thread waits for that copy and only then gives the bytes to gloo. What arrives goes up on another stream, and the
operation is done when it is there, so whoever has waited needs no event. An abort frees the main thread at once, as
with host memory: nothing that it waits for is a device's.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from runtime.device import DeviceRuntime, Event
from runtime.groups.communicator import Channel, Members, PendingOperation
from runtime.groups.gloo import GlooCommunicator
from runtime.groups.store import Rendezvous

Copies = Sequence[tuple[Tensor, Tensor]]
"""Sources and targets."""
_Asked = tuple[Event, Copies, Callable[[], PendingOperation], Callable[[BaseException | None], None]]
"""When the copies are on the host, and which; what is asked of gloo then; what follows it."""


class StagedGlooCommunicator(GlooCommunicator):
    """:param runtime: of the device that all tensors are on."""

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
        self._following: dict[PendingOperation, Callable[[BaseException | None], None]] = {}
        """By gloo's operation, what follows it. Guarded by the condition."""
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        threading.Thread(target=self._ask_in_order, name="communication-stage", daemon=True).start()

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

    def all_gather_uneven(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        return self._exchange(super().all_gather_uneven, target, source, members)

    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        return self._exchange(super().reduce_scatter, target, source, members)

    def close(self) -> None:
        self._close_stores()
        self._asked.put(None)

    # --- inside ----------------------------------------------------------------------------------

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
        """Copy ``down``, then ask gloo, then copy ``up``."""
        self.check()
        pending = PendingOperation()
        given, copied = self._runtime.event(), self._runtime.event()
        given.record()
        with self._runtime.on(self._down):
            self._down.wait(given)
            _copy(down)
            copied.record()

        def finish(error: BaseException | None) -> None:
            if error is None and not self._aborted:
                try:
                    self._bring_up(up, given)
                except RuntimeError as failed:
                    error = failed
            super(StagedGlooCommunicator, self)._finish(pending, error)

        self._asked.put((copied, down, ask, finish))
        return pending

    def _bring_up(self, up: Copies, given: Event) -> None:
        """Copy what has arrived to the device, whose work may use the targets until ``given``."""
        if up:
            there = self._runtime.event()
            with self._runtime.on(self._up):
                self._up.wait(given)
                _copy(up)
                there.record()
            there.synchronize()

    def _ask_in_order(self) -> None:
        """Give operations to gloo in the order in which the main thread posted them."""
        self._runtime.prepare_thread()
        while (asked := self._asked.get()) is not None:
            # What is copied down is kept until it is down: its memory would be given to others.
            copied, _down, ask, finish = asked
            try:
                copied.synchronize()
                pending = ask()
            except RuntimeError as error:
                finish(error)
            else:
                with self._condition:
                    is_done = pending.done
                    if not is_done:
                        self._following[pending] = finish
                if is_done:
                    finish(pending.error)
                del pending
            del asked, copied, _down, ask, finish
        super().close()

    def _finish(self, pending: PendingOperation, error: BaseException | None) -> None:
        with self._condition:
            following = self._following.pop(pending, None)
            if following is None:
                super()._finish(pending, error)
        if following is not None:
            following(error)


def _copy(copies: Copies) -> None:
    with torch.no_grad():
        for source, target in copies:
            target.copy_(source, non_blocking=True)
