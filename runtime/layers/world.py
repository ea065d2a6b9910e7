"""One generation's layout as one rank sees it: its seat in a pipeline, its neighbours, owners of layers.

Pure functions of the plan (``WorldData``), so every rank derives the same groups in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from planner.values import Recompute
from runtime.groups.communicator import Channel, CommunicationEdge, member_range
from statemachine.messages.trainer import WorldData, WorldStage

Peers = dict[int, tuple[int, int]]
"""Rows ``[start, end)`` of some ranks."""


class WorldError(ValueError):
    """The plan contradicts itself or the job: a peer's bug, named with the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows ``[start, end)`` of this rank's part of a microbatch are exchanged with ``peer``."""

    peer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
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
    activations_from: tuple[Route, ...]
    """Where activations come from; empty on the first stage."""
    activations_to: tuple[Route, ...]
    """Where activations go; empty on the last stage."""
    gradients_to: tuple[Route, ...]
    """Where gradients of activations go; empty on the first stage."""
    gradients_from: tuple[Route, ...]
    """Where they come from; empty on the last stage."""
    is_representative: bool = True
    """What it computes counts. Of devices that compute the same rows one does."""
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


def is_sharded(stage: WorldStage) -> bool:
    """Return whether each device of the stage has a part of its layers only."""
    return stage.within != "replicate" and len(stage.ranks) > 1


def is_tensor_parallel(stage: WorldStage) -> bool:
    """Return whether each device of the stage computes a part of its layers, on all rows."""
    return stage.within == "tensor" and len(stage.ranks) > 1


def has_shards(world: WorldData) -> bool:
    """Return whether any stage shards."""
    return any(is_sharded(stage) for pipeline in world.pipelines for stage in pipeline.stages)


def _taken(stage: WorldStage, microbatch_rows: int, *, coupled: bool) -> Peers:
    """Return the rows that each rank of a stage computes.

    Where rows are ``coupled`` they stay together: the first device takes all of them; where the devices have shards
    of the layers, all take all, as each is needed for putting parameters together. Devices that are tensor-parallel
    take all rows.
    """
    whole, none = (0, microbatch_rows), (microbatch_rows, microbatch_rows)
    if not (coupled or is_tensor_parallel(stage)):
        count = len(stage.ranks)
        return {rank: member_range(microbatch_rows, index, count) for index, rank in enumerate(stage.ranks)}
    return {rank: whole if rank == stage.ranks[0] or is_sharded(stage) else none for rank in stage.ranks}


def _told(stage: WorldStage, microbatch_rows: int, *, coupled: bool) -> Peers:
    """Return the rows of which each rank of a stage passes on what it computed: each row once."""
    taken = _taken(stage, microbatch_rows, coupled=coupled)
    if coupled or is_tensor_parallel(stage):
        return {stage.ranks[0]: taken[stage.ranks[0]]}
    return taken


def rank_assignment(
    world: WorldData, rank: int, microbatch_rows: int, *, coupled: bool = False
) -> RankAssignment:
    """:raises WorldError: the rank sits nowhere."""
    for pipeline in world.pipelines:
        for number, stage in enumerate(pipeline.stages):
            if rank not in stage.ranks:
                continue
            taken = partial(_taken, microbatch_rows=microbatch_rows, coupled=coupled)
            told = partial(_told, microbatch_rows=microbatch_rows, coupled=coupled)
            before = pipeline.stages[number - 1] if number > 0 else None
            behind = pipeline.stages[number + 1] if number + 1 < len(pipeline.stages) else None
            start, end = taken(stage)[rank]
            speaks = rank in told(stage)
            passed = (start, end) if speaks else (0, 0)
            return RankAssignment(
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
                activations_from=() if before is None else _routes(told(before), start, end),
                activations_to=() if behind is None else _routes(taken(behind), *passed),
                gradients_to=() if before is None else _routes(taken(before), *passed),
                gradients_from=() if behind is None else _routes(told(behind), start, end),
                is_representative=speaks,
                recompute=stage.recompute,
            )
    raise WorldError(f"rank {rank} has no place in the plan")


def _routes(peers: Peers, start: int, end: int) -> tuple[Route, ...]:
    """Return whom rows ``[start, end)`` are exchanged with. :param peers: the rows of each rank."""
    routes = []
    for peer, (their_start, their_end) in peers.items():
        first, last = max(start, their_start), min(end, their_end)
        if first < last:
            routes.append(Route(peer=peer, start=first - start, end=last - start))
    return tuple(routes)


def communication_edges(
    world: WorldData, microbatch_rows: int, *, coupled: bool = False
) -> frozenset[CommunicationEdge]:
    """Who passes rows to whom, and who sends layers to whom before the first step."""
    talks: set[CommunicationEdge] = set()
    taken = partial(_taken, microbatch_rows=microbatch_rows, coupled=coupled)
    told = partial(_told, microbatch_rows=microbatch_rows, coupled=coupled)
    for pipeline in world.pipelines:
        for stage, behind in pairwise(pipeline.stages):
            ways: tuple[tuple[Channel, Peers, Peers], ...] = (
                ("activation", told(stage), taken(behind)),
                ("gradient", told(behind), taken(stage)),
            )
            for channel, sources, targets in ways:
                for source, rows in sources.items():
                    for route in _routes(targets, *rows):
                        one, other = sorted((source, route.peer))
                        talks.add((channel, one, other))
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


def stages_of_layer(world: WorldData, layer: int) -> tuple[WorldStage, ...]:
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
