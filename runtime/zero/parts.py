"""Layers in parts: who has which elements of a layer, and who sends which elements to whom. The functions are
pure and do not use torch.

A layer's trainable parameters of one dtype, flattened in model order, are one *vector*, and so are its frozen
ones, which have neither gradients nor optimizer state. Parameters that are tied between the same layers are a
separate vector, which belongs to the first of these layers. A *part* of a layer is a range of fractions of it,
``(start, end, of)``: elements ``[start·n // of, end·n // of)`` of every vector of n elements.
``runtime.zero.cells`` says who owns which parts under a plan.

After a change, each rank of the new world needs the parameters of its layers (whole, or its share of
them), the optimizer's state of its new parts, and that of the parts that it holds a replica of (AOR).
``plan_transfers`` finds a source for each range of elements that a rank does not have itself. Every rank
derives the same list from the same plan.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from runtime.layers.world import is_sharded, owners_of_layer, stages_of_layer
from runtime.zero.cells import Cell, owned_parts, replica_parts
from statemachine.messages.trainer import PartData, WorldData
from storage.buckets import ParameterSize
from storage.layerstate import DTYPE_BYTES

MoveContent = Literal["parameters", "optimizer", "rest"]
_WORDS = {"parameters": "parameters", "optimizer": "optimizer's state"}
Range = tuple[int, int]
"""Elements ``[start, end)``."""


class PartsError(ValueError):
    """A plan that requires state which no rank of the new world has: a peer's bug. The message contains the
    numbers.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Elements ``[start, end)`` of the flattened parameter ``name``."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterVector:
    """Flattened parameters: ``names[i]`` is elements ``[offsets[i], offsets[i + 1])``, and the last offset is
    the length.
    """

    layers: tuple[int, ...]
    """Layers that use it, ascending; more than one if its parameters are tied."""
    dtype: str
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    trained: bool = True
    """Whether training changes its parameters. Frozen ones have neither gradients nor optimizer state."""

    @property
    def layer(self) -> int:
        """The first layer that uses the vector, whose owners own it."""
        return self.layers[0]

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    def part_range(self, start: int, end: int, of: int) -> Range:
        return self.numel * start // of, self.numel * end // of

    def slices(self, start: int, end: int) -> tuple[ParameterSlice, ...]:
        """Return the range as slices of parameters, without empty ones."""
        found = []
        for name, (first, last) in zip(self.names, pairwise(self.offsets), strict=True):
            low, high = max(start, first), min(end, last)
            if low < high:
                found.append(ParameterSlice(name=name, start=low - first, end=high - first))
        return tuple(found)

    def parameter_range(self, name: str) -> Range:
        """Return the range of the whole parameter."""
        index = self.names.index(name)
        return self.offsets[index], self.offsets[index + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTransfer:
    """The transfer of elements ``[start, end)`` of vector ``vector`` from ``source`` to ``target``.

    ``parameters`` are their values, ``optimizer`` the optimizer's state for them, and ``rest`` the persistent
    buffers of ``layer`` and the schedule (``vector`` is -1).
    """

    source: int
    target: int
    layer: int
    content: MoveContent
    vector: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The parameter vectors of a model, from which parts follow."""

    vectors: tuple[ParameterVector, ...]

    @classmethod
    def from_parameters(
        cls,
        parameter_layers: Mapping[str, tuple[int, ...]],
        sizes: Mapping[str, ParameterSize],
        vector_keys: Mapping[str, str] = MappingProxyType({}),
        frozen: Collection[str] = (),
    ) -> "ParameterLayout":
        """Return the layout of a model.

        :param parameter_layers: parameters in model order, with the layers that use each.
        :param vector_keys: keys of parameters; only parameters with equal keys share a vector.
        :param frozen: names of those that are not trained. Their vectors are the last ones.
        """
        found: dict[tuple[bool, tuple[int, ...], str, str], tuple[list[str], list[int]]] = {}
        for name, layers in parameter_layers.items():
            key = name in frozen, tuple(sorted(layers)), sizes[name].dtype, vector_keys.get(name, "")
            names, offsets = found.setdefault(key, ([], [0]))
            names.append(name)
            offsets.append(offsets[-1] + sizes[name].numel)
        return cls(
            vectors=tuple(
                ParameterVector(
                    layers=layers,
                    dtype=dtype,
                    names=tuple(names),
                    offsets=tuple(offsets),
                    trained=not is_frozen,
                )
                for (is_frozen, layers, dtype, _), (names, offsets) in sorted(found.items())
            )
        )

    def vectors_of_layer(self, layer: int, *, tied: bool = False) -> tuple[ParameterVector, ...]:
        """Return the vectors that belong to a layer; with ``tied``, all that it computes with."""
        return tuple(v for v in self.vectors if v.layer == layer or (tied and layer in v.layers))


def initial_holdings(world: WorldData, *, zero1: bool = False) -> tuple[PartData, ...]:
    """Return the holdings in a world where every owner has just been given all of its share of its layers.

    :param zero1: of the optimizer's state, it was given its part alone.
    """
    return tuple(
        PartData(
            rank=rank,
            layer=layer,
            start=start,
            end=end,
            of=of,
            replica=False,
            whole=not is_sharded(stage),
        )
        for layer in owners_of_layer(world)
        for stage in stages_of_layer(world, layer)
        for rank in stage.ranks
        for start, end, of in owned_parts(world, rank, layer, zero1=zero1)
    )


# --- gathering -----------------------------------------------------------------------------------


def gather_ranges(vector: ParameterVector, cell: Cell, world: WorldData) -> dict[int, list[Range]]:
    """Return for each owner of a cell (``common_cells``) the ranges of it that this owner sends after an update,
    in elements from the cell's first one.

    Together they cover each element of the cell once: the ranks of a stage divide the elements that all of them
    have updated.
    """
    begin, end = cell.elements(vector.numel)
    found: dict[int, list[Range]] = {rank: [] for rank in cell.owners}
    for stage in stages_of_layer(world, vector.layer):
        ranks = [rank for rank in stage.ranks if rank in found]
        for index, rank in enumerate(ranks):
            for part in owned_parts(world, rank, vector.layer, zero1=True):
                first, last = vector.part_range(*part)
                length = last - first
                last = first + length * (index + 1) // len(ranks)
                first += length * index // len(ranks)
                if (low := max(first, begin)) < (high := min(last, end)):
                    found[rank].append((low - begin, high - begin))
    return {rank: _merged(ranges) for rank, ranges in found.items()}


# --- moving --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Holdings:
    """Ranges of one vector that each rank has; primaries before replicas."""

    primary: dict[int, list[Range]] = field(default_factory=dict)
    replica: dict[int, list[Range]] = field(default_factory=dict)
    bounds: set[int] = field(default_factory=set)
    """Bounds of all added ranges: no range that is held as a unit crosses any of them."""

    def add(self, rank: int, one: Range, *, replica: bool = False) -> None:
        (self.replica if replica else self.primary).setdefault(rank, []).append(one)
        self.bounds.update(one)

    def of(self, rank: int) -> list[Range]:
        return _merged([*self.primary.get(rank, []), *self.replica.get(rank, [])])

    def holders(self, start: int, end: int) -> list[int]:
        """Return the ranks that have a range; no bound may lie inside of it."""
        for held in (self.primary, self.replica):
            ranks = [r for r, ranges in held.items() if any(a <= start and end <= b for a, b in ranges)]
            if ranks:
                return ranks
        return []


def plan_transfers(
    shape: ParameterLayout,
    world: WorldData,
    held: Sequence[PartData],
    *,
    zero1: bool,
    replicas: bool,
    restored: bool = False,
) -> tuple[PartTransfer, ...]:
    """Return the transfers that must happen before ``world`` can train.

    :param held: the parts held by the ranks of ``world``.
    :param zero1: owners divide the optimizer's state; otherwise each has that of all its parameters.
    :param replicas: whether AOR is on.
    :param restored: every rank has just restored all parameters that it computes with.
    :raises PartsError: no rank holds a part that is needed.
    """
    layers = _layers_of_ranks(world)
    load: dict[int, int] = {}
    wanted: list[tuple[int, PartTransfer, list[int]]] = []
    for number, vector in enumerate(shape.vectors):
        size = DTYPE_BYTES[vector.dtype]
        values, states = _holdings(vector, held, zero1)
        of: tuple[tuple[MoveContent, _Holdings], ...] = (("parameters", values), ("optimizer", states))
        for what, holdings in of:
            for rank, own in layers.items():
                if restored and what == "parameters":
                    continue
                needed = _needed(vector, world, rank, own, what, zero1, replicas)
                for start, end in _cut(_without(needed, holdings.of(rank)), holdings.bounds):
                    candidates = holdings.holders(start, end)
                    if not candidates:
                        raise PartsError(
                            f"no rank has the {_WORDS[what]} of elements {start}–{end} of layer "
                            f"{vector.layer} ({vector.dtype}), which rank {rank} needs"
                        )
                    transfer = PartTransfer(
                        source=-1,
                        target=rank,
                        layer=vector.layer,
                        content=what,
                        vector=number,
                        start=start,
                        end=end,
                    )
                    wanted.append(((end - start) * size, transfer, candidates))
    wanted += _rest(layers, held)
    transfers = []
    # Transfers with a single possible source come first; the others then balance the load, large ones
    # before small ones.
    wanted.sort(
        key=lambda w: (len(w[2]) > 1, -w[0], w[1].vector, w[1].layer, w[1].content, w[1].start, w[1].target)
    )
    for size, transfer, candidates in wanted:
        source = min(candidates, key=lambda rank: (load.get(rank, 0), rank))
        load[source] = load.get(source, 0) + max(size, 1)
        transfers.append(replace(transfer, source=source))
    return tuple(sorted(transfers, key=lambda m: (m.layer, m.vector, m.content, m.start, m.target)))


def _layers_of_ranks(world: WorldData) -> dict[int, set[int]]:
    layers: dict[int, set[int]] = {}
    for layer, ranks in owners_of_layer(world).items():
        for rank in ranks:
            layers.setdefault(rank, set()).add(layer)
    return dict(sorted(layers.items()))


def _holdings(vector: ParameterVector, held: Sequence[PartData], zero1: bool) -> tuple[_Holdings, _Holdings]:
    """Return the holdings of the parameters and of the optimizer's state.

    With ZeRO-1, only the owners of the first of tied layers keep the optimizer's state. Otherwise, every
    rank that computes with parameters does.
    """
    layers = {vector.layer} if zero1 else set(vector.layers)
    values, states = _Holdings(), _Holdings()
    whole: dict[int, set[int]] = {}
    for entry in held:
        if entry.whole:
            whole.setdefault(entry.rank, set()).add(entry.layer)
        if entry.layer in layers:
            for holdings in (values, states):
                part = vector.part_range(entry.start, entry.end, entry.of)
                holdings.add(entry.rank, part, replica=entry.replica)
    for rank, layers in whole.items():
        if not layers.isdisjoint(vector.layers):
            values.add(rank, (0, vector.numel))
    for holdings in (values, states):
        for by_rank in (holdings.primary, holdings.replica):
            for rank in by_rank:
                by_rank[rank] = _merged(by_rank[rank])
    return values, states


def _needed(
    vector: ParameterVector,
    world: WorldData,
    rank: int,
    own: set[int],
    what: MoveContent,
    zero1: bool,
    replicas: bool,
) -> list[Range]:
    using = own.intersection(vector.layers)
    if not using:
        return []
    if what == "optimizer" and not vector.trained:
        return []
    if what == "parameters" or not zero1:
        return _merged(
            [vector.part_range(*owned) for owned in owned_parts(world, rank, min(using), zero1=False)]
        )
    if vector.layer not in own:
        return []
    needed = [vector.part_range(*owned) for owned in owned_parts(world, rank, vector.layer, zero1=True)]
    if replicas:
        needed += [vector.part_range(*owned) for owned in replica_parts(world, rank, vector.layer)]
    return _merged(needed)


def _rest(
    layers: Mapping[int, set[int]], held: Sequence[PartData]
) -> list[tuple[int, PartTransfer, list[int]]]:
    """Return the transfers of everything but parameters.

    A rank that holds any part of a layer was an owner of it, and has its buffers.
    """
    holders: dict[int, set[int]] = {}
    for entry in held:
        holders.setdefault(entry.layer, set()).add(entry.rank)
    wanted = []
    for rank, own in layers.items():
        for layer in sorted(own):
            having = holders.get(layer, set())
            if rank in having:
                continue
            if not having:
                raise PartsError(f"no rank has any part of layer {layer}, which rank {rank} needs")
            transfer = PartTransfer(
                source=-1, target=rank, layer=layer, content="rest", vector=-1, start=0, end=0
            )
            wanted.append((0, transfer, sorted(having)))
    return wanted


# --- ranges --------------------------------------------------------------------------------------


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges ascending and disjoint, with a gap between any two, without empty ones."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _without(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """Return ``ranges`` without the elements of ``taken``; both must be merged (``_merged``)."""
    left: list[Range] = []
    for start, end in ranges:
        begin = start
        for low, high in taken:
            if high <= begin or end <= low:
                continue
            if begin < low:
                left.append((begin, low))
            begin = high
        if begin < end:
            left.append((begin, end))
    return left


def _cut(ranges: Sequence[Range], bounds: Collection[int]) -> list[Range]:
    """Return the ranges cut at ``bounds``."""
    found: list[Range] = []
    for start, end in ranges:
        cuts = [start, *sorted(b for b in bounds if start < b < end), end]
        found += list(pairwise(cuts))
    return found
