"""Gathering of parameters after an update of parts (ZeRO-1): each owner of a cell gets what others have
updated.

The ranks that have a cell (``runtime.zero.cells``) send each other the ranges that
``runtime.zero.parts.gather_ranges`` returns, in chunks of equal size, so that no second copy of the whole
model is needed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.groups.communicator import Communicator, Members, PendingOperation
from runtime.layers.world import is_sharded, stages_of_layer
from runtime.monitoring.progress import ProgressMonitor
from runtime.zero.cells import common_cells
from runtime.zero.parts import ParameterLayout, ParameterSlice, Range, gather_ranges
from statemachine.messages.trainer import WorldData

CHUNK_BYTES = 2 * 1024 * 1024
"""Bytes received by one operation, from all members together."""
_UNDER_WAY = 2

Copies = tuple[list[Tensor], list[Tensor]]
"""Targets and sources, one for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    members: Members
    sent: Tensor
    received: Tensor
    packing: Copies
    unpacking: Copies


@dataclass(slots=True)
class _Joined:
    """Cells of one dtype that the same ranks have, one after the other."""

    ranges: dict[int, list[Range]]
    """Ranges that each member sends."""
    runs: list[tuple[int, Tensor]] = field(default_factory=list)
    """Memory of elements by the first element, ascending."""
    numel: int = 0


class ParameterGather:
    """The gathering operations of one generation.

    They are not reused, because after an abort a stuck operation may still write into its buffers.

    :param value_of: returns the memory of elements that this rank has.
    """

    def __init__(
        self,
        shape: ParameterLayout,
        world: WorldData,
        value_of: Callable[[ParameterSlice], Tensor],
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self._communicator = communicator
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._chunks: list[_Chunk] = []
        found: dict[tuple[Members, str], _Joined] = {}
        for vector in [one for one in shape.vectors if one.trained]:
            stages = stages_of_layer(world, vector.layer)
            for cell in common_cells(world, vector.layers):
                start, end = cell.elements(vector.numel)
                owners = cell.owners
                if communicator.rank not in owners or len(owners) < 2 or start == end:
                    continue
                if len(stages) == 1 and not is_sharded(stages[0]) and set(owners) == set(stages[0].ranks):
                    continue  # Each owner updates the whole vector.
                joined = found.setdefault((owners, vector.dtype), _Joined({rank: [] for rank in owners}))
                for rank, ranges in gather_ranges(vector, cell, world).items():
                    joined.ranges[rank] += [(joined.numel + low, joined.numel + high) for low, high in ranges]
                joined.runs += [
                    (joined.numel + vector.parameter_range(one.name)[0] + one.start - start, value_of(one))
                    for one in vector.slices(start, end)
                ]
                joined.numel += end - start
        for (members, dtype), joined in found.items():
            self._plan_chunks(members, dtype, joined)

    def run(self, monitor: ProgressMonitor) -> None:
        """Make the parameters of all layers of this rank whole.

        :raises CommunicationError: the group was aborted, or a peer is lost; some parameters are not whole.
        """
        under_way: deque[tuple[_Chunk, PendingOperation]] = deque()
        for chunk in self._chunks:
            if len(under_way) == _UNDER_WAY:
                self._finish(*under_way.popleft(), monitor)
            _copy(chunk.packing)
            under_way.append(
                (chunk, self._communicator.all_gather(chunk.received, chunk.sent, chunk.members))
            )
        while under_way:
            self._finish(*under_way.popleft(), monitor)

    def _finish(self, chunk: _Chunk, pending: PendingOperation, monitor: ProgressMonitor) -> None:
        monitor.wait(self._communicator, pending)
        _copy(chunk.unpacking)
        monitor.tick()

    def _plan_chunks(self, members: Members, name: str, joined: _Joined) -> None:
        """Plan the chunks of one group."""
        ranges = joined.ranges
        dtype = getattr(torch, name)
        most = max(CHUNK_BYTES // dtype.itemsize // len(members), 1)
        left = max(sum(end - start for start, end in ranges[rank]) for rank in members)
        for done in range(0, left, most):
            count = min(most, left - done)
            sent, received = self._buffers_for(name, count, len(members))
            packing: Copies = ([], [])
            unpacking: Copies = ([], [])
            for index, rank in enumerate(members):
                own = rank == self._communicator.rank
                place = sent if own else received[index * count : (index + 1) * count]
                for value, offset in _values_of(joined.runs, ranges[rank], done, done + count):
                    part = place[offset : offset + value.numel()]
                    targets, sources = packing if own else unpacking
                    targets.append(part if own else value)
                    sources.append(value if own else part)
            chunk = _Chunk(
                members=members, sent=sent, received=received, packing=packing, unpacking=unpacking
            )
            self._chunks.append(chunk)

    def _buffers_for(self, dtype: str, count: int, members: int) -> tuple[Tensor, Tensor]:
        """Return a pair of buffers. Two pairs take turns: when one is used again, its previous operation has
        been finished.
        """
        turn = len(self._chunks) % _UNDER_WAY
        found = []
        for place, numel in ((2 * turn, count), (2 * turn + 1, count * members)):
            buffer = self._buffers.get((dtype, place))
            if buffer is None or buffer.numel() < numel:
                buffer = torch.empty(numel, dtype=getattr(torch, dtype), device=self._device)
                self._buffers[dtype, place] = buffer
            found.append(buffer[:numel])
        return found[0], found[1]


def _values_of(
    runs: Sequence[tuple[int, Tensor]], ranges: Sequence[Range], first: int, last: int
) -> list[tuple[Tensor, int]]:
    """Return elements ``[first, last)`` of the concatenated ranges: memory, with the offset from ``first``."""
    found = []
    done = 0
    for start, end in ranges:
        low, high = max(start, start + first - done), min(end, start + last - done)
        if low < high:
            found += _parts_of(runs, low, high, done + low - start - first)
        done += end - start
    return found


def _parts_of(
    runs: Sequence[tuple[int, Tensor]], low: int, high: int, place: int
) -> list[tuple[Tensor, int]]:
    found = []
    for offset, value in runs:
        start, end = max(low, offset), min(high, offset + value.numel())
        if start < end:
            found.append((value[start - offset : end - offset], place + start - low))
    return found


def _copy(copies: Copies) -> None:
    targets, sources = copies
    if targets:
        torch._foreach_copy_(targets, sources)
