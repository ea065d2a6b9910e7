"""Behind an update of parts (ZeRO-1): each owner of a bucket gets the parameters that others have updated.

The ranks of a bucket's group send each other what ``runtime.zero.parts.contributions`` says, in pieces of
equal size, so that no copy of the whole model is needed beside the model itself.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.groups.communicator import Communicator, Members, Pending
from runtime.layers.model import Model
from runtime.watch.pace import Pace
from runtime.wire.protocol import WorldData
from runtime.zero.parts import Range, Shape, contributions
from storage.buckets import Bucket

PIECE_BYTES = 2 * 1024 * 1024
"""Received by one operation, from all members together."""
_UNDER_WAY = 2

Copies = tuple[list[Tensor], list[Tensor]]
"""Targets and sources, one for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    members: Members
    sent: Tensor
    received: Tensor
    packing: Copies
    unpacking: Copies


class ParameterGather:
    """Belongs to one generation: after an abort a stuck operation may still write into its buffers.

    :param buckets: of the whole model, as for the gradients, whose groups it uses.
    """

    def __init__(
        self,
        model: Model,
        shape: Shape,
        buckets: Collection[Bucket],
        world: WorldData,
        communicator: Communicator,
    ) -> None:
        self._communicator = communicator
        self._values = {
            name: parameter.detach().view(-1)
            for name, parameter in model.named_parameters(range(model.layer_count))
            if not parameter.is_meta
        }
        self._device = model.device
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._pieces: list[_Piece] = []
        for bucket in sorted(buckets, key=lambda b: b.index):
            ranges = contributions(shape, bucket, world) if communicator.rank in bucket.owners else {}
            if ranges:
                self._lay_out(bucket, ranges)

    def run(self, pace: Pace) -> None:
        """The parameters of all layers of this rank are whole.

        :raises CommunicationError: aborted, or a peer is lost; some of them are not.
        """
        under_way: deque[tuple[_Piece, Pending]] = deque()
        for piece in self._pieces:
            if len(under_way) == _UNDER_WAY:
                self._finish(*under_way.popleft(), pace)
            _copy(piece.packing)
            under_way.append(
                (piece, self._communicator.all_gather(piece.received, piece.sent, piece.members))
            )
        while under_way:
            self._finish(*under_way.popleft(), pace)

    def _finish(self, piece: _Piece, pending: Pending, pace: Pace) -> None:
        pace.wait(self._communicator, pending)
        _copy(piece.unpacking)
        pace.tick()

    def _lay_out(self, bucket: Bucket, ranges: dict[int, list[Range]]) -> None:
        dtype = getattr(torch, bucket.dtype)
        members = bucket.owners
        most = max(PIECE_BYTES // dtype.itemsize // len(members), 1)
        left = max(sum(end - start for start, end in ranges[rank]) for rank in members)
        for done in range(0, left, most):
            count = min(most, left - done)
            sent, received = self._buffers_for(bucket.dtype, count, len(members))
            packing: Copies = ([], [])
            unpacking: Copies = ([], [])
            for index, rank in enumerate(members):
                own = rank == self._communicator.rank
                place = sent if own else received[index * count : (index + 1) * count]
                for value, offset in self._values_of(bucket, ranges[rank], done, done + count):
                    part = place[offset : offset + value.numel()]
                    targets, sources = packing if own else unpacking
                    targets.append(part if own else value)
                    sources.append(value if own else part)
            piece = _Piece(
                members=members, sent=sent, received=received, packing=packing, unpacking=unpacking
            )
            self._pieces.append(piece)

    def _buffers_for(self, dtype: str, count: int, members: int) -> tuple[Tensor, Tensor]:
        """Two sets take turns: when one is used again, what it was used for before has been finished."""
        turn = len(self._pieces) % _UNDER_WAY
        found = []
        for place, numel in ((2 * turn, count), (2 * turn + 1, count * members)):
            buffer = self._buffers.get((dtype, place))
            if buffer is None or buffer.numel() < numel:
                buffer = torch.empty(numel, dtype=getattr(torch, dtype), device=self._device)
                self._buffers[dtype, place] = buffer
            found.append(buffer[:numel])
        return found[0], found[1]

    def _values_of(
        self, bucket: Bucket, ranges: Sequence[Range], first: int, last: int
    ) -> list[tuple[Tensor, int]]:
        """Elements ``[first, last)`` of the ranges put together, each run with its place behind ``first``."""
        found = []
        done = 0
        for start, end in ranges:
            low, high = max(start, start + first - done), min(end, start + last - done)
            if low < high:
                found += self._parameters_of(bucket, low, high, done + low - start - first)
            done += end - start
        return found

    def _parameters_of(self, bucket: Bucket, low: int, high: int, place: int) -> list[tuple[Tensor, int]]:
        found = []
        for name, offset, numel in zip(bucket.parameters, bucket.offsets, bucket.numels, strict=True):
            start, end = max(low, offset), min(high, offset + numel)
            if start < end:
                found.append((self._values[name][start - offset : end - offset], place + start - low))
        return found


def _copy(copies: Copies) -> None:
    targets, sources = copies
    if targets:
        torch._foreach_copy_(targets, sources)
