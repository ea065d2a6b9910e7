"""One generation's layout as seen by one rank: its assignment, its neighbours, and the owners of layers.

All functions are pure functions of the plan (``WorldData``), so every rank derives the same groups in the
same order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from planner.values import Recompute
from runtime.groups.communicator import Channel, CommunicationEdge, member_range
from statemachine.messages.trainer import WorldData, WorldPipeline, WorldStage

Peers = dict[int, tuple[int, int]]
"""Rows ``[start, end)`` of some ranks."""


class WorldError(ValueError):
    """A plan that contradicts itself or the job: a peer's bug. The message contains the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows ``[start, end)`` of this rank's part of a microbatch that it exchanges with ``peer``."""

    peer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """The work of one rank in a generation: its layers, microbatches, rows and neighbours."""

    rank: int
    stage: int
    stages: int
    first_layer: int
    end_layer: int
    first_microbatch: int
    microbatches: int
    first_row: int
    """First row of this rank's part of each microbatch; the devices of a stage split microbatches by rows."""
    rows: int
    microbatch_rows: int
    """Rows of a whole microbatch."""
    activations_from: tuple[Route, ...]
    """Sources of activations; empty on the first stage."""
    activations_to: tuple[Route, ...]
    """Targets of activations; empty on the last stage."""
    gradients_to: tuple[Route, ...]
    """Targets of gradients of activations; empty on the first stage."""
    gradients_from: tuple[Route, ...]
    """Sources of gradients of activations; empty on the last stage."""
    is_representative: bool = True
    """Whether this rank's results count. Among devices that compute the same rows, exactly one is
    representative.
    """
    recompute: Recompute = "none"
    """Way in which the layers of the stage get their activations in the backward pass."""

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
    """Return whether each device of the stage has only a part of the stage's layers."""
    return stage.parts > 1


def is_tensor_parallel(stage: WorldStage) -> bool:
    """Return whether each device of the stage computes a part of its layers, on all rows of its replica."""
    return stage.within == "tensor" and len(stage.ranks) > 1


def replica_ranks(stage: WorldStage, rank: int) -> tuple[int, ...]:
    """Return the ranks that have all of the stage's state together with ``rank``, in the order of their parts."""
    first = stage.ranks.index(rank) // stage.parts * stage.parts
    return stage.ranks[first : first + stage.parts]


def is_first_replica(stage: WorldStage, rank: int) -> bool:
    """Return whether no rank before ``rank`` has the same part of the stage's state."""
    return stage.ranks.index(rank) < stage.parts


def has_shards(world: WorldData) -> bool:
    """Return whether any stage shards."""
    return any(is_sharded(stage) for pipeline in world.pipelines for stage in pipeline.stages)


def _taken(stage: WorldStage, microbatch_rows: int, *, coupled: bool) -> Peers:
    """Return the rows that each rank of a stage computes.

    Tensor-parallel devices compute all rows of their replica. Coupled rows stay together: the first device
    computes all of them. If the devices have parts of the layers, all devices of the first replica do, because
    each is needed to gather parameters.
    """
    together = stage.parts if coupled or is_tensor_parallel(stage) else 1
    if coupled:
        whole, none = (0, microbatch_rows), (microbatch_rows, microbatch_rows)
        return {rank: whole if index < together else none for index, rank in enumerate(stage.ranks)}
    count = len(stage.ranks) // together
    return {
        rank: member_range(microbatch_rows, index // together, count)
        for index, rank in enumerate(stage.ranks)
    }


def _passed_on(stage: WorldStage, microbatch_rows: int, *, coupled: bool) -> Peers:
    """Return the rows whose results each rank of a stage passes on; each row has exactly one such rank."""
    taken = _taken(stage, microbatch_rows, coupled=coupled)
    if coupled:
        return {stage.ranks[0]: taken[stage.ranks[0]]}
    if is_tensor_parallel(stage):
        return {rank: taken[rank] for rank in stage.ranks[:: stage.parts]}
    return taken


def rank_assignment(
    world: WorldData, rank: int, microbatch_rows: int, *, coupled: bool = False
) -> RankAssignment:
    """Return the assignment of ``rank``.

    :raises WorldError: the plan does not contain the rank.
    """
    pipeline, number = _position_of(world, rank)
    stage = pipeline.stages[number]
    taken = partial(_taken, microbatch_rows=microbatch_rows, coupled=coupled)
    passed_on = partial(_passed_on, microbatch_rows=microbatch_rows, coupled=coupled)
    previous = pipeline.stages[number - 1] if number > 0 else None
    following = pipeline.stages[number + 1] if number + 1 < len(pipeline.stages) else None
    start, end = taken(stage)[rank]
    speaks = rank in passed_on(stage)
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
        activations_from=() if previous is None else _routes(passed_on(previous), start, end),
        activations_to=() if following is None else _routes(taken(following), *passed),
        gradients_to=() if previous is None else _routes(taken(previous), *passed),
        gradients_from=() if following is None else _routes(passed_on(following), start, end),
        is_representative=speaks,
        recompute=stage.recompute,
    )


def stage_of(world: WorldData, rank: int) -> WorldStage:
    """Return the stage of ``rank``.

    :raises WorldError: the plan does not contain the rank.
    """
    pipeline, number = _position_of(world, rank)
    return pipeline.stages[number]


def _position_of(world: WorldData, rank: int) -> tuple[WorldPipeline, int]:
    """Return the pipeline of ``rank``, and the number of the rank's stage in it."""
    for pipeline in world.pipelines:
        for number, stage in enumerate(pipeline.stages):
            if rank in stage.ranks:
                return pipeline, number
    raise WorldError(f"rank {rank} is not in the plan")


def _routes(peers: Peers, start: int, end: int) -> tuple[Route, ...]:
    """Return the peers that rows ``[start, end)`` are exchanged with.
    :param peers: the rows of each rank.
    """
    routes = []
    for peer, (their_start, their_end) in peers.items():
        first, last = max(start, their_start), min(end, their_end)
        if first < last:
            routes.append(Route(peer=peer, start=first - start, end=last - start))
    return tuple(routes)


def communication_edges(
    world: WorldData, microbatch_rows: int, *, coupled: bool = False
) -> frozenset[CommunicationEdge]:
    """Return which ranks send rows to which others, or whole layers before the first step."""
    edges: set[CommunicationEdge] = set()
    taken = partial(_taken, microbatch_rows=microbatch_rows, coupled=coupled)
    passed_on = partial(_passed_on, microbatch_rows=microbatch_rows, coupled=coupled)
    for pipeline in world.pipelines:
        for stage, following in pairwise(pipeline.stages):
            ways: tuple[tuple[Channel, Peers, Peers], ...] = (
                ("activation", passed_on(stage), taken(following)),
                ("gradient", passed_on(following), taken(stage)),
            )
            for channel, sources, targets in ways:
                for source, rows in sources.items():
                    for route in _routes(targets, *rows):
                        edges.add((channel, source, route.peer))
    edges.update(("state", transfer.source, transfer.target) for transfer in world.transfers)
    return frozenset(edges)


def owners_of_layer(world: WorldData) -> dict[int, tuple[int, ...]]:
    """Return for each layer the ranks that hold it, ascending, over all pipelines."""
    owners: dict[int, list[int]] = {}
    for pipeline in world.pipelines:
        for stage in pipeline.stages:
            for layer in range(stage.first_layer, stage.end_layer):
                owners.setdefault(layer, []).extend(stage.ranks)
    return {layer: tuple(sorted(ranks)) for layer, ranks in sorted(owners.items())}


def stages_of_layer(world: WorldData, layer: int) -> tuple[WorldStage, ...]:
    """Return the stage that owns the layer in each pipeline, in the order of the pipelines."""
    return tuple(
        stage for p in world.pipelines for stage in p.stages if stage.first_layer <= layer < stage.end_layer
    )


def replicated_layers(world: WorldData, *, whole: bool = False) -> frozenset[int]:
    """Return the layers of which the world has several copies: one in each pipeline, one on each device of a
    stage that does not shard, and one in each replica of a tensor-parallel stage.

    :param whole: leave out the copies that a stage shards.
    """
    copies: Counter[int] = Counter()
    for pipeline in world.pipelines:
        for stage in pipeline.stages:
            count = 0 if whole and is_sharded(stage) else len(stage.ranks) // stage.parts
            copies.update(dict.fromkeys(range(stage.first_layer, stage.end_layer), count))
    return frozenset(layer for layer, count in copies.items() if count > 1)


def check_world(world: WorldData, layers: int, microbatches: int) -> None:
    """Check that each pipeline has every layer once, and that every microbatch and every rank is assigned
    once.

    :raises WorldError: the plan violates this.
    """
    ranks: list[int] = []
    spans: list[tuple[int, int]] = []
    for number, pipeline in enumerate(world.pipelines):
        end = 0
        for stage in pipeline.stages:
            if stage.first_layer != end or stage.end_layer <= end or not stage.ranks:
                raise WorldError(
                    f"pipeline {number}: stage {stage.first_layer}–{stage.end_layer} follows layer {end}"
                )
            end = stage.end_layer
            ranks += stage.ranks
        if end != layers:
            raise WorldError(f"pipeline {number} ends at layer {end}, the model has {layers}")
        spans.append((pipeline.first_microbatch, pipeline.first_microbatch + pipeline.microbatches))
    _check_spans(spans, microbatches)
    size = len(world.hosts)
    if sorted(ranks) != list(range(size)):
        raise WorldError(f"the pipelines have ranks {sorted(ranks)}, but there are hosts for {size}")
    for transfer in world.transfers:
        inside = 0 <= transfer.source < size and 0 <= transfer.target < size and 0 <= transfer.layer < layers
        if not inside or transfer.source == transfer.target:
            raise WorldError(f"impossible transfer {transfer}")


def _check_spans(spans: Sequence[tuple[int, int]], microbatches: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop < start:
            raise WorldError(f"microbatches {start}–{stop} of a pipeline follow {end}: a gap or an overlap")
        end = stop
    if end != microbatches:
        raise WorldError(f"the pipelines compute {end} microbatches, the job has {microbatches}")
