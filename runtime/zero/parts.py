"""ZeRO-1: who has which elements of a layer, and who sends which to whom. Pure; no torch.

Of each dtype a layer's trainable parameters, flattened in model order, are one *vector*; a parameter that is
tied between layers is in the vector of the first of them alone. With m owner stages, one in each pipeline,
stage i has *part* i of every vector: elements ``[i·n // m, (i+1)·n // m)``. All its ranks have the same.

After a change each rank of the new world needs whole parameters of its layers, the optimizer's state of its
new part, and of the next part where it keeps a replica (AOR). ``moves_of`` finds for each range of elements
that a rank has not itself one that has it: every rank derives the same list from the same plan.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from runtime.layers.world import owners_of_layer, stages_of_layer
from runtime.wire.protocol import PartData, WorldData
from storage.buckets import Bucket, ParameterSize
from storage.layerstate import DTYPE_BYTES

What = Literal["parameters", "optimizer", "rest"]
_WORDS = {"parameters": "parameters", "optimizer": "optimizer's state"}
Range = tuple[int, int]
"""Elements ``[start, end)``."""


class PartsError(ValueError):
    """The plan asks for state that nobody of the new world has: a peer's bug, named with the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Elements ``[start, end)`` of the flattened parameter ``name``."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Parameter ``names[i]`` is elements ``[offsets[i], offsets[i + 1])``; the last offset is the length."""

    layer: int
    dtype: str
    names: tuple[str, ...]
    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    def part(self, part: int, parts: int) -> Range:
        return self.numel * part // parts, self.numel * (part + 1) // parts

    def slices(self, start: int, end: int) -> tuple[Slice, ...]:
        """The range, parameter by parameter; empty ones left out."""
        found = []
        for name, (first, last) in zip(self.names, pairwise(self.offsets), strict=True):
            low, high = max(start, first), min(end, last)
            if low < high:
                found.append(Slice(name=name, start=low - first, end=high - first))
        return tuple(found)

    def place(self, name: str) -> Range:
        """Where the whole parameter lies."""
        index = self.names.index(name)
        return self.offsets[index], self.offsets[index + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``source`` sends elements ``[start, end)`` of vector ``vector`` to ``target``.

    ``parameters``: the values; ``optimizer``: its state for them; ``rest``: what else belongs to ``layer``,
    persistent buffers and parameters that are not trained (no vector, -1).
    """

    source: int
    target: int
    layer: int
    what: What
    vector: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model decides about parts."""

    vectors: tuple[Vector, ...]
    parameter_layers: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, parameter_layers: Mapping[str, tuple[int, ...]], sizes: Mapping[str, ParameterSize]
    ) -> "Shape":
        """:param parameter_layers: trainable parameters in model order, with the layers that use each."""
        found: dict[tuple[int, str], tuple[list[str], list[int]]] = {}
        for name, layers in parameter_layers.items():
            names, offsets = found.setdefault((min(layers), sizes[name].dtype), ([], [0]))
            names.append(name)
            offsets.append(offsets[-1] + sizes[name].numel)
        return cls(
            vectors=tuple(
                Vector(layer=layer, dtype=dtype, names=tuple(names), offsets=tuple(offsets))
                for (layer, dtype), (names, offsets) in sorted(found.items())
            ),
            parameter_layers=dict(parameter_layers),
        )

    def of_layer(self, layer: int) -> tuple[Vector, ...]:
        return tuple(vector for vector in self.vectors if vector.layer == layer)

    def used_by(self, vector: Vector, layers: Collection[int]) -> list[Range]:
        """The runs of its elements that any of ``layers`` computes with."""
        places = [
            vector.place(n) for n in vector.names if not set(layers).isdisjoint(self.parameter_layers[n])
        ]
        return _merged(places)


def pipeline_of(world: WorldData, rank: int) -> int:
    """Its number is the number of the part of all layers that the rank owns, out of ``len(pipelines)``."""
    for number, pipeline in enumerate(world.pipelines):
        if any(rank in stage.ranks for stage in pipeline.stages):
            return number
    raise PartsError(f"rank {rank} has no place in the plan")


def keeps_replica(world: WorldData, rank: int) -> bool:
    """One rank of each stage does, where there is another owner."""
    lowest = any(rank == min(stage.ranks) for p in world.pipelines for stage in p.stages)
    return lowest and len(world.pipelines) > 1


def protector_and_protege(world: WorldData, layer: int, rank: int) -> tuple[tuple[int, ...], int]:
    """The ranks that keep replicas of what ``rank`` has of ``layer``, and the one whose it keeps itself.

    Of the stage that is protected the lowest rank speaks; the others hold the same.
    """
    stages = stages_of_layer(world, layer)
    mine = next(i for i, stage in enumerate(stages) if rank in stage.ranks)
    before, behind = stages[mine - 1], stages[(mine + 1) % len(stages)]
    speaks = rank == min(stages[mine].ranks)
    return ((min(before.ranks),) if speaks else ()), min(behind.ranks)


def everything(world: WorldData) -> tuple[PartData, ...]:
    """What is held where every owner has just been given its whole layers."""
    return tuple(
        PartData(rank=rank, layer=layer, part=0, parts=1, replica=False, whole=True)
        for layer, ranks in owners_of_layer(world).items()
        for rank in ranks
    )


# --- gathering -----------------------------------------------------------------------------------


def contributions(shape: Shape, bucket: Bucket, world: WorldData) -> dict[int, list[Range]]:
    """For each owner of the bucket the ranges of it that this rank sends behind an update.

    Together they are the bucket, each element once: the ranks of a stage share out what they all have. Empty
    where all owners have all of it.
    """
    found: dict[int, list[Range]] = {rank: [] for rank in bucket.owners}
    homes = {name: vector for vector in shape.vectors for name in vector.names}
    owning = [stages_of_layer(world, homes[name].layer) for name in bucket.parameters]
    if all(len(stages) == 1 and set(stages[0].ranks) == set(bucket.owners) for stages in owning):
        return {}
    for name, offset, stages in zip(bucket.parameters, bucket.offsets, owning, strict=True):
        vector = homes[name]
        first, last = vector.place(name)
        for number, stage in enumerate(stages):
            low, high = vector.part(number, len(stages))
            for index, rank in enumerate(stage.ranks):
                start = max(first, low + (high - low) * index // len(stage.ranks))
                end = min(last, low + (high - low) * (index + 1) // len(stage.ranks))
                if start < end:
                    found[rank].append((offset + start - first, offset + end - first))
    return {rank: _merged(ranges) for rank, ranges in found.items()}


# --- moving --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Holdings:
    """Who has which runs of one vector; primaries before replicas."""

    primary: dict[int, list[Range]] = field(default_factory=dict)
    replica: dict[int, list[Range]] = field(default_factory=dict)

    def add(self, rank: int, ranges: Iterable[Range], *, replica: bool = False) -> None:
        (self.replica if replica else self.primary).setdefault(rank, []).extend(ranges)

    def of(self, rank: int) -> list[Range]:
        return _merged([*self.primary.get(rank, []), *self.replica.get(rank, [])])

    def bounds(self) -> set[int]:
        held = [*self.primary.values(), *self.replica.values()]
        return {bound for ranges in held for one in ranges for bound in one}

    def holders(self, start: int, end: int) -> list[int]:
        """Of a range that no bound lies in."""
        for held in (self.primary, self.replica):
            ranks = [r for r, ranges in held.items() if any(a <= start and end <= b for a, b in ranges)]
            if ranks:
                return ranks
        return []


def moves_of(shape: Shape, world: WorldData, held: Sequence[PartData], *, replicas: bool) -> tuple[Move, ...]:
    """Who sends what to whom before ``world`` can train.

    :param held: of the ranks of ``world``.
    :param replicas: AOR is on.
    :raises PartsError: a part is nowhere.
    """
    layers = _layers_of_ranks(world)
    load: dict[int, int] = {}
    wanted: list[tuple[int, Move, list[int]]] = []
    for number, vector in enumerate(shape.vectors):
        size = DTYPE_BYTES[vector.dtype]
        values, states = _holdings(shape, vector, held)
        of: tuple[tuple[What, _Holdings], ...] = (("parameters", values), ("optimizer", states))
        for what, holdings in of:
            for rank, own in layers.items():
                needed = _needed(shape, vector, world, rank, own, what, replicas)
                for start, end in _cut(_without(needed, holdings.of(rank)), holdings.bounds()):
                    candidates = holdings.holders(start, end)
                    if not candidates:
                        raise PartsError(
                            f"nobody has the {_WORDS[what]} of elements {start}–{end} of layer "
                            f"{vector.layer} ({vector.dtype}), which rank {rank} needs"
                        )
                    move = Move(
                        source=-1,
                        target=rank,
                        layer=vector.layer,
                        what=what,
                        vector=number,
                        start=start,
                        end=end,
                    )
                    wanted.append(((end - start) * size, move, candidates))
    wanted += _rest(layers, held)
    moves = []
    # What only one can send first, the rest where it evens that out; large ones before small ones.
    wanted.sort(
        key=lambda w: (len(w[2]) > 1, -w[0], w[1].vector, w[1].layer, w[1].what, w[1].start, w[1].target)
    )
    for size, move, candidates in wanted:
        source = min(candidates, key=lambda rank: (load.get(rank, 0), rank))
        load[source] = load.get(source, 0) + max(size, 1)
        moves.append(replace(move, source=source))
    return tuple(sorted(moves, key=lambda m: (m.layer, m.vector, m.what, m.start, m.target)))


def _layers_of_ranks(world: WorldData) -> dict[int, set[int]]:
    layers: dict[int, set[int]] = {}
    for layer, ranks in owners_of_layer(world).items():
        for rank in ranks:
            layers.setdefault(rank, set()).add(layer)
    return dict(sorted(layers.items()))


def _holdings(shape: Shape, vector: Vector, held: Sequence[PartData]) -> tuple[_Holdings, _Holdings]:
    """Of the parameters and of the optimizer's state."""
    values, states = _Holdings(), _Holdings()
    whole: dict[int, set[int]] = {}
    for entry in held:
        if entry.whole:
            whole.setdefault(entry.rank, set()).add(entry.layer)
        if entry.layer == vector.layer:
            for holdings in (values, states):
                holdings.add(entry.rank, [vector.part(entry.part, entry.parts)], replica=entry.replica)
    for rank, layers in whole.items():
        values.add(rank, shape.used_by(vector, layers))
    for holdings in (values, states):
        for by_rank in (holdings.primary, holdings.replica):
            for rank in by_rank:
                by_rank[rank] = _merged(by_rank[rank])
    return values, states


def _needed(
    shape: Shape, vector: Vector, world: WorldData, rank: int, own: set[int], what: What, replicas: bool
) -> list[Range]:
    if what == "parameters":
        return shape.used_by(vector, own)
    if vector.layer not in own:
        return []
    part, parts = pipeline_of(world, rank), len(world.pipelines)
    needed = [vector.part(part, parts)]
    if replicas and keeps_replica(world, rank):
        needed.append(vector.part((part + 1) % parts, parts))
    return _merged(needed)


def _rest(layers: Mapping[int, set[int]], held: Sequence[PartData]) -> list[tuple[int, Move, list[int]]]:
    """Whoever has anything of a layer was its owner, and has its buffers."""
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
                raise PartsError(f"nobody has anything of layer {layer}, which rank {rank} needs")
            move = Move(source=-1, target=rank, layer=layer, what="rest", vector=-1, start=0, end=0)
            wanted.append((0, move, sorted(having)))
    return wanted


# --- ranges --------------------------------------------------------------------------------------


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Ascending, disjoint, with a gap between any two; empty ones left out."""
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
    """Both as ``_merged`` gives them."""
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
    """Cut where somebody's part begins or ends."""
    pieces: list[Range] = []
    for start, end in ranges:
        cuts = [start, *sorted(b for b in bounds if start < b < end), end]
        pieces += list(pairwise(cuts))
    return pieces
