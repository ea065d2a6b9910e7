"""State transfer between live replicas: whole layers, from rank to rank, in the order of the plan.

A layer travels as a length pair, a header and a payload (``runtime.state``). Each rank does whatever is
possible at the moment - post sends within a window, receive from all its sources side by side - and never
waits for one particular peer, so no cycle of sources and targets can stand still.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.communicator import Communicator, Pending
from runtime.pace import Pace
from runtime.protocol import TransferData
from runtime.state import LayerStates

WINDOW_BYTES = 256 * 1024 * 1024
"""Packed copies that a source holds at a time; a single larger layer is sent alone."""
MAX_HEADER_BYTES = 64 * 1024 * 1024


class TransferError(RuntimeError):
    """A peer announced something impossible."""


@dataclass(slots=True)
class _Sending:
    size_bytes: int
    pendings: list[Pending] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(pending.done for pending in self.pendings)


class Exchange:
    """The transfers of one generation that this rank takes part in."""

    def __init__(
        self,
        transfers: Sequence[TransferData],
        *,
        states: LayerStates,
        communicator: Communicator,
        pace: Pace,
        device: torch.device,
        complete: set[int],
    ) -> None:
        """:param complete: layers held at the resume step; each is added when all of it is there."""
        self._states = states
        self._communicator = communicator
        self._pace = pace
        self._device = device
        self._complete = complete
        rank = communicator.rank
        self._to_send = deque(t for t in transfers if t.source == rank)
        self._sending: list[_Sending] = []
        self._to_receive: dict[int, list[int]] = {}
        for transfer in transfers:
            if transfer.target == rank:
                self._to_receive.setdefault(transfer.source, []).append(transfer.layer)
        self.received_bytes = 0

    def run(self) -> None:
        """:raises CommunicationError: aborted, or a peer is lost; layers not in ``complete`` are void.
        :raises TransferError: a peer's bug.
        """
        receiving = {source: self._receive_all(source, layers) for source, layers in self._to_receive.items()}
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
            layer = self._to_send[0].layer
            if self._sending and under_way + self._states.state_bytes(layer) > WINDOW_BYTES:
                return
            self._sending.append(self._send(self._to_send.popleft()))

    def _send(self, transfer: TransferData) -> _Sending:
        self._pace.tick()
        if transfer.layer not in self._complete:
            raise TransferError(f"the plan takes layer {transfer.layer} from here, where it is not complete")
        header, payload = self._states.pack(transfer.layer)
        sending = _Sending(size_bytes=len(header) + payload.numel())
        lengths = torch.tensor([len(header), payload.numel()], dtype=torch.int64)
        for tensor in (lengths, torch.frombuffer(bytearray(header), dtype=torch.uint8), payload):
            if tensor.numel():
                sent = tensor.to(self._device)
                sending.pendings.append(self._communicator.send(sent, transfer.target, "state"))
        return sending

    def _receive_all(self, source: int, layers: list[int]) -> Iterator[Pending]:
        """A chain of receives from one source; continue it when the one that it yielded is done."""
        for layer in layers:
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
            self._unpack(layer, header.cpu(), payload.cpu())

    def _unpack(self, layer: int, header: Tensor, payload: Tensor) -> None:
        self._states.unpack(layer, bytes(header.numpy()), payload)
        self._complete.add(layer)
        self.received_bytes += header.numel() + payload.numel()
