"""State transfer between live replicas, from rank to rank, in the order of the plan.

Whole layers travel (``runtime.layers.state``) or, under ZeRO-1, ranges of elements
(``runtime.zero.part_states``): a length pair, a header and a payload for each. Each rank does whatever is
possible at the moment - post sends within a window, receive from all its sources side by side - and never
waits for one particular peer, so no cycle of sources and targets can stand still.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from runtime.groups.communicator import Communicator, Pending
from runtime.layers.state import LayerStates
from runtime.watch.pace import Pace
from runtime.wire.protocol import TransferData

WINDOW_BYTES = 256 * 1024 * 1024
"""Packed copies that a source holds at a time; a single larger one is sent alone."""
MAX_HEADER_BYTES = 64 * 1024 * 1024


class TransferError(RuntimeError):
    """A peer announced something impossible."""


class Parcel(Protocol):
    """What one rank sends to one other."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...


Item = TypeVar("Item", bound=Parcel)
Item_contra = TypeVar("Item_contra", bound=Parcel, contravariant=True)


class Packer(Protocol[Item_contra]):
    """Makes bytes of what is sent, and takes what comes."""

    def state_bytes(self, item: Item_contra) -> int:
        """Of the payload."""

    def pack(self, item: Item_contra) -> tuple[bytes, Tensor]:
        """Header and payload, a copy in host memory."""

    def unpack(self, item: Item_contra, header: bytes, payload: Tensor) -> None:
        """:raises StateError: these are of something else."""


class WholeLayers:
    """Packs whole layers.

    :param complete: layers held at the resume step; each is added when all of it is there.
    """

    def __init__(self, states: LayerStates, complete: set[int]) -> None:
        self._states = states
        self._complete = complete

    def state_bytes(self, item: TransferData) -> int:
        return self._states.state_bytes(item.layer)

    def pack(self, item: TransferData) -> tuple[bytes, Tensor]:
        if item.layer not in self._complete:
            raise TransferError(f"the plan takes layer {item.layer} from here, where it is not complete")
        return self._states.pack(item.layer)

    def unpack(self, item: TransferData, header: bytes, payload: Tensor) -> None:
        self._states.unpack(item.layer, header, payload)
        self._complete.add(item.layer)


@dataclass(slots=True)
class _Sending:
    size_bytes: int
    pendings: list[Pending] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(pending.done for pending in self.pendings)


class Exchange(Generic[Item]):
    """The transfers of one generation that this rank takes part in."""

    def __init__(
        self,
        items: Sequence[Item],
        *,
        packer: Packer[Item],
        communicator: Communicator,
        pace: Pace,
        device: torch.device,
    ) -> None:
        self._packer = packer
        self._communicator = communicator
        self._pace = pace
        self._device = device
        rank = communicator.rank
        self._to_send = deque(item for item in items if item.source == rank)
        self._sending: list[_Sending] = []
        self._to_receive: dict[int, list[Item]] = {}
        for item in items:
            if item.target == rank:
                self._to_receive.setdefault(item.source, []).append(item)
        self.received_bytes = 0

    def run(self) -> None:
        """:raises CommunicationError: aborted, or a peer is lost; what had not arrived whole is void.
        :raises TransferError: a peer's bug.
        """
        receiving = {source: self._receive_all(source, items) for source, items in self._to_receive.items()}
        awaited: dict[int, Pending] = {}
        for source in list(receiving):
            self._advance(source, receiving, awaited)
        while True:
            self._top_up()
            outstanding = [*awaited.values(), *(p for s in self._sending for p in s.pendings if not p.done)]
            if not outstanding:
                return
            self._pace.wait_any(self._communicator, outstanding)
            for source, pending in list(awaited.items()):
                if pending.done:
                    self._communicator.wait(pending)
                    self._advance(source, receiving, awaited)

    def _advance(
        self, source: int, receiving: dict[int, Iterator[Pending]], awaited: dict[int, Pending]
    ) -> None:
        self._pace.tick()
        pending = next(receiving[source], None)
        if pending is None:
            del receiving[source]
            awaited.pop(source, None)
        else:
            awaited[source] = pending

    def _top_up(self) -> None:
        """Retire sends that are done and start as many as the window takes."""
        for sending in self._sending:
            if sending.done:
                for pending in sending.pendings:
                    self._communicator.wait(pending)
        self._sending = [s for s in self._sending if not s.done]
        while self._to_send:
            under_way = sum(s.size_bytes for s in self._sending)
            if self._sending and under_way + self._packer.state_bytes(self._to_send[0]) > WINDOW_BYTES:
                return
            self._sending.append(self._send(self._to_send.popleft()))

    def _send(self, item: Item) -> _Sending:
        self._pace.tick()
        header, payload = self._packer.pack(item)
        sending = _Sending(size_bytes=len(header) + payload.numel())
        lengths = torch.tensor([len(header), payload.numel()], dtype=torch.int64)
        for tensor in (lengths, torch.frombuffer(bytearray(header), dtype=torch.uint8), payload):
            if tensor.numel():
                sent = tensor.to(self._device)
                sending.pendings.append(self._communicator.send(sent, item.target, "state"))
        return sending

    def _receive_all(self, source: int, items: list[Item]) -> Iterator[Pending]:
        """A chain of receives from one source; continue it when the one that it yielded is done."""
        for item in items:
            lengths = torch.zeros(2, dtype=torch.int64, device=self._device)
            yield self._communicator.receive(lengths, source, "state")
            header_bytes, payload_bytes = (int(n) for n in lengths)
            if not (0 < header_bytes <= MAX_HEADER_BYTES and payload_bytes >= 0):
                raise TransferError(f"rank {source} announced {header_bytes} + {payload_bytes} bytes")
            header = torch.empty(header_bytes, dtype=torch.uint8, device=self._device)
            payload = torch.empty(payload_bytes, dtype=torch.uint8, device=self._device)
            pendings = [
                self._communicator.receive(tensor, source, "state")
                for tensor in (header, payload)
                if tensor.numel()
            ]
            yield from pendings
            self._unpack(item, header.cpu(), payload.cpu())

    def _unpack(self, item: Item, header: Tensor, payload: Tensor) -> None:
        self._packer.unpack(item, bytes(header.numpy()), payload)
        self.received_bytes += header.numel() + payload.numel()
