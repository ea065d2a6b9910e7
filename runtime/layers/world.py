"""One generation's layout as one rank sees it: its seat in a pipeline, its neighbours, owners of layers.

Pure functions of the plan (``WorldData``), so every rank derives the same groups in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from runtime.groups.communicator import Talk
from runtime.wire.protocol import Recompute, StageData, WorldData


class WorldError(ValueError):
    """The plan contradicts itself or the job: a peer's bug, named with the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows ``[start, end)`` of this rank's part of a microbatch are exchanged with ``peer``."""

    peer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one rank computes."""

    rank: int
    stage: int
    stages: int
    first_layer: int
    end_layer: int
    first_microbatch: int
    microbatches: int
    first_row: int
    """Of this rank's part within each microbatch: the devices of a stage split it by rows."""
    rows: int
    microbatch_rows: int
    """Of whole microbatches."""
    previous: tuple[Route, ...]
    """Where activations come from and their gradients go; empty on the first stage."""
    following: tuple[Route, ...]
    """Where activations go; empty on the last stage."""
    recompute: Recompute = "none"
    """How its layers get their activations in the backward pass."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def rows_of(microbatch_rows: int, index: int, devices: int, *, coupled: bool = False) -> tuple[int, int]:
    """Return the rows ``[start, end)`` of a microbatch for device ``index`` of a stage.

    Sizes differ by at most 1. Where rows are ``coupled``, the first device takes all of them.
    """
    if coupled:
        return (0, microbatch_rows) if index == 0 else (microbatch_rows, microbatch_rows)
    return microbatch_rows * index // devices, microbatch_rows * (index + 1) // devices


def seat_of(world: WorldData, rank: int, microbatch_rows: int, *, coupled: bool = False) -> Seat:
    """:raises WorldError: the rank sits nowhere."""
    for pipeline in world.pipelines:
        for number, stage in enumerate(pipeline.stages):
            if rank not in stage.ranks:
                continue
            start, end = rows_of(microbatch_rows, stage.ranks.index(rank), len(stage.ranks), coupled=coupled)
            before = pipeline.stages[number - 1] if number > 0 else None
            behind = pipeline.stages[number + 1] if number + 1 < len(pipeline.stages) else None
            return Seat(
                rank=rank,
                stage=number,
                stages=len(pipeline.stages),
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                first_microbatch=pipeline.first_microbatch,
                microbatches=pipeline.microbatches,
                first_row=start,
                rows=end - start,
                microbatch_rows=microbatch_rows,
                previous=_routes(before, start, end, microbatch_rows, coupled=coupled),
                following=_routes(behind, start, end, microbatch_rows, coupled=coupled),
                recompute=stage.recompute,
            )
    raise WorldError(f"rank {rank} has no place in the plan")


def _routes(
    neighbour: StageData | None, start: int, end: int, microbatch_rows: int, *, coupled: bool
) -> tuple[Route, ...]:
    if neighbour is None:
        return ()
    routes = []
    for index, peer in enumerate(neighbour.ranks):
        their_start, their_end = rows_of(microbatch_rows, index, len(neighbour.ranks), coupled=coupled)
        first, last = max(start, their_start), min(end, their_end)
        if first < last:
            routes.append(Route(peer=peer, start=first - start, end=last - start))
    return tuple(routes)


def talks_of(world: WorldData, microbatch_rows: int, *, coupled: bool = False) -> frozenset[Talk]:
    """Who passes rows to whom, and who sends layers to whom before the first step."""
    talks: set[Talk] = set()
    for pipeline in world.pipelines:
        for stage, behind in pairwise(pipeline.stages):
            for index, rank in enumerate(stage.ranks):
                start, end = rows_of(microbatch_rows, index, len(stage.ranks), coupled=coupled)
                for route in _routes(behind, start, end, microbatch_rows, coupled=coupled):
                    one, other = sorted((rank, route.peer))
                    talks |= {("activation", one, other), ("gradient", one, other)}
    for transfer in world.transfers:
        one, other = sorted((transfer.source, transfer.target))
        talks.add(("state", one, other))
    return frozenset(talks)


def owners_of_layer(world: WorldData) -> dict[int, tuple[int, ...]]:
    """For each layer the ranks that hold it, ascending, over all pipelines."""
    owners: dict[int, list[int]] = {}
    for pipeline in world.pipelines:
        for stage in pipeline.stages:
            for layer in range(stage.first_layer, stage.end_layer):
                owners.setdefault(layer, []).extend(stage.ranks)
    return {layer: tuple(sorted(ranks)) for layer, ranks in sorted(owners.items())}


def stages_of_layer(world: WorldData, layer: int) -> tuple[StageData, ...]:
    """The stage that owns it in each pipeline, in the order of the pipelines."""
    return tuple(
        stage for p in world.pipelines for stage in p.stages if stage.first_layer <= layer < stage.end_layer
    )


def check_world(world: WorldData, layers: int, microbatches: int) -> None:
    """Every layer once in each pipeline, every microbatch once over all, every rank in one seat.

    :raises WorldError: otherwise.
    """
    ranks: list[int] = []
    spans: list[tuple[int, int]] = []
    for number, pipeline in enumerate(world.pipelines):
        end = 0
        for stage in pipeline.stages:
            if stage.first_layer != end or stage.end_layer <= end or not stage.ranks:
                raise WorldError(
                    f"pipeline {number}: stage {stage.first_layer}–{stage.end_layer} behind layer {end}"
                )
            end = stage.end_layer
            ranks += stage.ranks
        if end != layers:
            raise WorldError(f"pipeline {number} ends at layer {end}, the model has {layers}")
        spans.append((pipeline.first_microbatch, pipeline.first_microbatch + pipeline.microbatches))
    _check_spans(spans, microbatches)
    size = len(world.hosts)
    if sorted(ranks) != list(range(size)):
        raise WorldError(f"ranks {sorted(ranks)} sit in the pipelines, there are hosts for {size}")
    for transfer in world.transfers:
        inside = 0 <= transfer.source < size and 0 <= transfer.target < size and 0 <= transfer.layer < layers
        if not inside or transfer.source == transfer.target:
            raise WorldError(f"impossible transfer {transfer}")


def _check_spans(spans: Sequence[tuple[int, int]], microbatches: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop < start:
            raise WorldError(f"microbatches {start}–{stop} of a pipeline behind {end}: a gap or an overlap")
        end = stop
    if end != microbatches:
        raise WorldError(f"the pipelines compute {end} microbatches, the job has {microbatches}")
