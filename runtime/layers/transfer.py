"""State transfer between ranks, in the order of the plan.

Ranks transfer whole layers (``runtime.layers.state``) or, under ZeRO-1, ranges of elements
(``runtime.zero.part_states``). Each transfer consists of a pair of lengths, a header and a payload in
chunks. A rank always does whatever is possible at the moment: it posts sends within a window and receives
from all its sources in parallel. It never waits for one particular peer, so cycles of sources and targets
cannot deadlock.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from runtime.groups.communicator import Communicator, PendingOperation
from runtime.layers.parked import ParkedLayers
from runtime.layers.state import LayerStates, PayloadWriter
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import TransferData

CHUNK_BYTES = 4 * 1024 * 1024
"""Size of one message. A payload is copied out of the tensors and into them one chunk at a time, so a transfer
needs memory for a few chunks only.
"""
WINDOW_BYTES = 4 * CHUNK_BYTES
"""Limit of the copies that a source holds at a time."""
CHUNKS_AHEAD = 2
"""Number of chunks that a target waits for at a time, from each source."""
MAX_HEADER_BYTES = 64 * 1024 * 1024


class TransferError(RuntimeError):
    """An announcement by a peer that cannot be right."""


class RoutedItem(Protocol):
    """State that one rank sends to another."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...


Item = TypeVar("Item", bound=RoutedItem)
Item_contra = TypeVar("Item_contra", bound=RoutedItem, contravariant=True)


class OutgoingPayload(Protocol):
    """State to send, as bytes."""

    @property
    def header(self) -> bytes: ...

    @property
    def size_bytes(self) -> int:
        """Size of the payload."""

    def read(self, start: int, end: int) -> Tensor:
        """Return bytes [start, end) of the payload: a copy, or a view of memory that does not change while it
        is sent.
        """


class TransferEndpoint(Protocol[Item_contra]):
    """Conversion between items and bytes, on both ends of a transfer."""

    def open_send(self, item: Item_contra) -> OutgoingPayload:
        """Return the payload of an item that this rank sends."""

    def open_receive(self, item: Item_contra, header: bytes, size_bytes: int) -> PayloadWriter:
        """Prepare to receive an item.

        :raises StateError: the header belongs to something else.
        """


class LayerEndpoint:
    """Transfers of whole layers; parked ones are sent from host memory.

    :param complete: layers held at the resume step; a received layer is added when all of it has arrived.
    """

    def __init__(self, states: LayerStates, complete: set[int], parked: ParkedLayers) -> None:
        self._states = states
        self._complete = complete
        self._parked = parked

    def open_send(self, item: TransferData) -> OutgoingPayload:
        if item.layer not in self._complete:
            raise TransferError(f"the plan sends layer {item.layer} from this rank, where it is not complete")
        parked = self._parked.get(item.layer)
        return self._states.reader(item.layer) if parked is None else parked

    def open_receive(self, item: TransferData, header: bytes, size_bytes: int) -> PayloadWriter:
        return self._states.writer(item.layer, header, size_bytes, self._complete)


@dataclass(slots=True)
class _Send:
    size_bytes: int
    pending: PendingOperation


class StateExchange(Generic[Item]):
    """The transfers of one generation that this rank takes part in."""

    def __init__(
        self,
        items: Sequence[Item],
        *,
        endpoint: TransferEndpoint[Item],
        communicator: Communicator,
        monitor: ProgressMonitor,
        device: torch.device,
    ) -> None:
        self._packer = endpoint
        self._communicator = communicator
        self._monitor = monitor
        self._device = device
        rank = communicator.rank
        self._to_send = self._messages([item for item in items if item.source == rank])
        self._next = next(self._to_send, None)
        self._sending: list[_Send] = []
        self._to_receive: dict[int, list[Item]] = {}
        for item in items:
            if item.target == rank:
                self._to_receive.setdefault(item.source, []).append(item)
        self._received_bytes = 0

    def run(self) -> int:
        """Run all transfers of this rank, and return the number of bytes received.

        :raises CommunicationError: the group was aborted, or a peer is lost; items that had not arrived
            completely are void.
        :raises TransferError: a peer announced something impossible.
        """
        receiving = {source: self._receive_all(source, items) for source, items in self._to_receive.items()}
        awaited: dict[int, PendingOperation] = {}
        for source in list(receiving):
            self._advance(source, receiving, awaited)
        while True:
            self._post_sends()
            # Sends that have completed since make room for further ones, so they end the wait, too.
            outstanding = [*awaited.values(), *(sending.pending for sending in self._sending)]
            if not outstanding:
                return self._received_bytes
            self._monitor.wait_any(self._communicator, outstanding)
            for source, pending in list(awaited.items()):
                if pending.is_complete():
                    self._communicator.wait(pending)
                    self._advance(source, receiving, awaited)

    def _advance(
        self,
        source: int,
        receiving: dict[int, Iterator[PendingOperation]],
        awaited: dict[int, PendingOperation],
    ) -> None:
        self._monitor.tick()
        pending = next(receiving[source], None)
        if pending is None:
            del receiving[source]
            awaited.pop(source, None)
        else:
            awaited[source] = pending

    def _post_sends(self) -> None:
        """Retire completed sends, and start as many new ones as the window allows."""
        under_way_before, self._sending = self._sending, []
        for sending in under_way_before:
            if sending.pending.is_complete():
                self._communicator.wait(sending.pending)
            else:
                self._sending.append(sending)
        under_way = sum(s.size_bytes for s in self._sending)
        while self._next is not None:
            message, target = self._next
            if self._sending and under_way + message.nbytes > WINDOW_BYTES:
                return
            self._monitor.tick()
            pending = self._communicator.send(message, target, "state")
            self._sending.append(_Send(message.nbytes, pending))
            under_way += message.nbytes
            self._next = next(self._to_send, None)

    def _messages(self, items: list[Item]) -> Iterator[tuple[Tensor, int]]:
        """Yield each message with its target; a chunk is copied when it is requested."""
        for item in items:
            outgoing = self._packer.open_send(item)
            header, size = outgoing.header, outgoing.size_bytes
            yield torch.tensor([len(header), size], dtype=torch.int64).to(self._device), item.target
            yield torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self._device), item.target
            for start in range(0, size, CHUNK_BYTES):
                chunk = outgoing.read(start, min(start + CHUNK_BYTES, size))
                yield chunk.to(self._device), item.target

    def _receive_all(self, source: int, items: list[Item]) -> Iterator[PendingOperation]:
        """Yield the receives from one source in turn; the caller resumes the generator when the last one is
        complete.
        """
        for item in items:
            lengths = torch.zeros(2, dtype=torch.int64, device=self._device)
            yield self._communicator.receive(lengths, source, "state")
            header_bytes, size_bytes = self._monitor.read_values(lengths)
            if not (0 < header_bytes <= MAX_HEADER_BYTES and size_bytes >= 0):
                raise TransferError(f"rank {source} announced {header_bytes} + {size_bytes} bytes")
            header = torch.empty(header_bytes, dtype=torch.uint8, device=self._device)
            yield self._communicator.receive(header, source, "state")
            incoming = self._packer.open_receive(
                item, bytes(self._monitor.to_host(header).numpy()), size_bytes
            )
            ahead: deque[tuple[int, Tensor, PendingOperation]] = deque()
            starts = iter(range(0, size_bytes, CHUNK_BYTES))
            while True:
                for start in islice(starts, CHUNKS_AHEAD - len(ahead)):
                    chunk = torch.empty(
                        min(CHUNK_BYTES, size_bytes - start), dtype=torch.uint8, device=self._device
                    )
                    ahead.append((start, chunk, self._communicator.receive(chunk, source, "state")))
                if not ahead:
                    break
                start, chunk, pending = ahead.popleft()
                yield pending
                incoming.write(start, chunk)
            incoming.finish()
            self._received_bytes += header_bytes + size_bytes
