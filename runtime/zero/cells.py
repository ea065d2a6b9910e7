"""Ownership of a layer's fractions, which stages divide among their devices. The functions are pure and do
not use torch.

A stage that divides its layers into k parts gives the j-th device of each of its replicas the fractions
[j/k, (j + 1)/k); one that does not divide them gives all of them to each device. Pipelines may be cut
differently. The unit is therefore a *cell*: the fractions between two neighbouring cuts of any of the stages
that have a layer. Every stage has the whole of a cell on one device of each of its replicas.

Gradients of a cell are summed over all ranks that have it. With ZeRO-1, these ranks divide the cell's
optimizer state: of m stages, stage i keeps the i-th of m parts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm

from runtime.layers.world import is_first_replica, stage_of, stages_of_layer
from statemachine.messages.trainer import WorldData, WorldStage

Fractions = tuple[int, int, int]
"""``(start, end, of)``: elements ``[start·n // of, end·n // of)`` of n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Fractions ``[start, end)``, and for each stage the ranks that have them, ascending."""

    start: Fraction
    end: Fraction
    holders: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks of all stages, ascending."""
        return tuple(sorted(rank for ranks in self.holders for rank in ranks))

    def elements(self, numel: int) -> tuple[int, int]:
        """Return the elements ``[start, end)`` of a vector of ``numel`` elements."""
        return int(self.start * numel), int(self.end * numel)

    def part(self, index: int, count: int) -> tuple[Fraction, Fraction]:
        """Return the ``index``-th of ``count`` equal parts."""
        step = (self.end - self.start) / count
        return self.start + index * step, self.start + (index + 1) * step


def share_of(stage: WorldStage, rank: int) -> Fractions:
    """Return the fractions of each of the stage's layers that a rank has."""
    index = stage.ranks.index(rank) % stage.parts
    return index, index + 1, stage.parts


def cells_of(stages: Sequence[WorldStage]) -> tuple[Cell, ...]:
    """Return the cells of a layer that all of these stages have, ascending."""
    counts = {stage.parts for stage in stages}
    cuts = sorted({Fraction(cut, count) for count in counts for cut in range(count + 1)})
    return tuple(
        Cell(start=start, end=end, holders=tuple(_holders(stage, start) for stage in stages))
        for start, end in pairwise(cuts)
    )


def _holders(stage: WorldStage, start: Fraction) -> tuple[int, ...]:
    return tuple(sorted(stage.ranks[int(start * stage.parts) :: stage.parts]))


def common_cells(world: WorldData, layers: Collection[int]) -> tuple[Cell, ...]:
    """Return the cells of vectors that all of ``layers`` share, over the stages that have any of these layers."""
    stages = [
        stage
        for pipeline in world.pipelines
        for stage in pipeline.stages
        if any(stage.first_layer <= layer < stage.end_layer for layer in layers)
    ]
    return cells_of(stages)


def owned_parts(world: WorldData, rank: int, layer: int, *, zero1: bool) -> tuple[Fractions, ...]:
    """Return the parts of a layer for which ``rank`` keeps the optimizer's state, ascending; the rank must
    have the layer.
    """
    stages = stages_of_layer(world, layer)
    mine = next(index for index, stage in enumerate(stages) if rank in stage.ranks)
    if not zero1:
        return (share_of(stages[mine], rank),)
    cells = [cell for cell in cells_of(stages) if rank in cell.holders[mine]]
    return tuple(lowest_terms(*cell.part(mine, len(stages))) for cell in cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAssignment:
    """The replica (AOR) of a part of a layer: ``holder`` repeats the updates that ``owner`` makes."""

    part: Fractions
    owner: int
    holder: int


def replica_assignments(world: WorldData, layer: int) -> tuple[ReplicaAssignment, ...]:
    """Return the replicas (AOR) of a layer's parts; empty with one pipeline.

    The holder is an owner in the previous pipeline. If several ranks of a stage have the same part, the lowest
    of them holds the replica and represents the others.
    """
    stages = stages_of_layer(world, layer)
    if len(stages) < 2:
        return ()
    return tuple(
        ReplicaAssignment(
            part=lowest_terms(*cell.part(number, len(stages))),
            owner=min(cell.holders[number]),
            holder=min(cell.holders[number - 1]),
        )
        for cell in cells_of(stages)
        for number in range(len(stages))
    )


def holds_replicas(world: WorldData, rank: int) -> bool:
    """Return whether ``rank`` holds replicas (AOR) of another owner's parts."""
    return len(world.pipelines) > 1 and is_first_replica(stage_of(world, rank), rank)


def replica_parts(world: WorldData, rank: int, layer: int) -> tuple[Fractions, ...]:
    """Return the parts of a layer of which ``rank`` holds a replica (AOR)."""
    return tuple(one.part for one in replica_assignments(world, layer) if one.holder == rank)


def lowest_terms(start: Fraction, end: Fraction) -> Fractions:
    """Return both fractions over their least common denominator."""
    of = lcm(start.denominator, end.denominator)
    return int(start * of), int(end * of), of
