"""Property tests of which rank has which elements and sends which, for any model, any two worlds, and any
state of the old one.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.layers.world import is_first_replica, is_sharded, owners_of_layer, stage_of
from runtime.zero.cells import (
    Fractions,
    common_cells,
    owned_parts,
    replica_assignments,
    replica_parts,
    share_of,
)
from runtime.zero.parts import (
    ParameterLayout,
    PartsError,
    gather_ranges,
    initial_holdings,
    plan_transfers,
)
from statemachine.messages.trainer import PartData, WorldData, WorldPipeline, WorldStage
from storage.buckets import ParameterSize

LAYERS = 5


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ParameterLayout, dict[str, ParameterSize]]:
    """Draw parameters of any length, some empty, some tied between two layers, of two dtypes."""
    layers: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, ParameterSize] = {}
    for layer in range(LAYERS):
        for number in range(draw(st.integers(0, 3))):
            name = f"{layer}.{number}"
            also = draw(st.sampled_from([layer, layer, LAYERS - 1]))
            layers[name] = tuple(sorted({layer, also}))
            dtype = draw(st.sampled_from(["float32", "float32", "bfloat16"]))
            sizes[name] = ParameterSize(numel=draw(st.integers(0, 40)), dtype=dtype)
    return ParameterLayout.from_parameters(layers, sizes), sizes


@st.composite
def worlds(draw: st.DrawFn) -> WorldData:
    pipelines, rank = [], 0
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=3)))
        stages = []
        for first, end in zip([0, *cuts], [*cuts, LAYERS], strict=True):
            width = draw(st.sampled_from([1, 1, 2, 3, 4]))
            ranks, within = (
                tuple(range(rank, rank + width)),
                draw(st.sampled_from(["replicate", "shard", "tensor"])),
            )
            replicas = 2 if (width, within) == (4, "tensor") and draw(st.booleans()) else 1
            stages.append(
                WorldStage(first_layer=first, end_layer=end, ranks=ranks, within=within, replicas=replicas)
            )
            rank += width
        pipelines.append(WorldPipeline(stages=tuple(stages), first_microbatch=0, microbatches=1))
    return WorldData(pipelines=tuple(pipelines), transfers=(), hosts=("h",) * rank)


@st.composite
def situations(draw: st.DrawFn) -> tuple[ParameterLayout, WorldData, tuple[PartData, ...], bool, bool]:
    """Draw an old world of which some ranks survive with other numbers; some of these are not whole."""
    shape, _ = draw(shapes())
    old, new = draw(worlds()), draw(worlds())
    lived = draw(st.permutations(range(len(old.hosts))))
    kept = draw(st.integers(0, min(len(old.hosts), len(new.hosts))))
    numbers = dict(zip(lived[:kept], draw(st.permutations(range(len(new.hosts)))), strict=False))
    zero1 = draw(st.booleans())
    aor = zero1 and draw(st.booleans())
    held = []
    for was, rank in numbers.items():
        for layer, owners in owners_of_layer(old).items():
            if was not in owners:
                continue
            whole = draw(st.booleans()) and not is_sharded(stage_of(old, was))
            for part in owned_parts(old, was, layer, zero1=zero1):
                held.append(_part(rank, layer, part, False, whole))
            for part in replica_parts(old, was, layer) if aor else ():
                held.append(_part(rank, layer, part, True, whole))
    return shape, new, tuple(draw(st.permutations(held))), zero1, zero1 and draw(st.booleans())


def _part(rank: int, layer: int, part: Fractions, replica: bool, whole: bool) -> PartData:
    start, end, of = part
    return PartData(rank=rank, layer=layer, start=start, end=end, of=of, replica=replica, whole=whole)


def having(
    shape: ParameterLayout, held: Sequence[PartData], rank: int, what: str, zero1: bool
) -> set[tuple[int, int]]:
    """Return (vector, element) pairs, computed in the slow and plain way."""
    found = set()
    for entry in held:
        if entry.rank != rank:
            continue
        for number, vector in enumerate(shape.vectors):
            layers = vector.layers[:1] if zero1 else vector.layers
            if entry.layer in layers:
                found |= {(number, e) for e in range(*vector.part_range(entry.start, entry.end, entry.of))}
            if what == "parameters" and entry.whole and entry.layer in vector.layers:
                found |= {(number, e) for e in range(vector.numel)}
    return found


def optimizer_elements(shape: ParameterLayout, world: WorldData) -> dict[int, set[tuple[int, int]]]:
    """Return the elements whose optimizer's state each rank owns."""
    held = owned(world)
    return {rank: having(shape, held, rank, "optimizer", True) for rank in {entry.rank for entry in held}}


def needing(
    shape: ParameterLayout, world: WorldData, rank: int, what: str, zero1: bool, replicas: bool
) -> set[tuple[int, int]]:
    own = {layer for layer, ranks in owners_of_layer(world).items() if rank in ranks}
    found = set()
    for number, vector in enumerate(shape.vectors):
        if not own & set(vector.layers):
            continue
        parts: tuple[Fractions, ...] = (share_of(stage_of(world, rank), rank),)
        if zero1 and what == "optimizer":
            parts = ()
            if vector.layer in own:
                parts = owned_parts(world, rank, vector.layer, zero1=True)
                parts += replica_parts(world, rank, vector.layer) if replicas else ()
        found |= {(number, e) for part in parts for e in range(*vector.part_range(*part))}
    return found


@settings(max_examples=150)
@given(situations())
def test_every_needed_element_has_one_source_that_holds_it(
    situation: tuple[ParameterLayout, WorldData, tuple[PartData, ...], bool, bool],
) -> None:
    shape, world, held, zero1, replicas = situation
    ranks = range(len(world.hosts))
    lost = any(
        needing(shape, world, rank, what, zero1, replicas)
        - set().union(*(having(shape, held, r, what, zero1) for r in ranks))
        for rank in ranks
        for what in ("parameters", "optimizer")
    ) or {entry.layer for entry in held} != set(range(LAYERS))
    if lost:
        with pytest.raises(PartsError, match="no rank has"):
            plan_transfers(shape, world, held, zero1=zero1, replicas=replicas)
        return
    moves = plan_transfers(shape, world, held, zero1=zero1, replicas=replicas)
    assert moves == plan_transfers(shape, world, tuple(reversed(held)), zero1=zero1, replicas=replicas)
    for rank in ranks:
        for what in ("parameters", "optimizer"):
            got = Counter(
                (m.vector, e)
                for m in moves
                if (m.target, m.content) == (rank, what)
                for e in range(m.start, m.end)
            )
            missing = needing(shape, world, rank, what, zero1, replicas) - having(
                shape, held, rank, what, zero1
            )
            assert got == Counter(missing)
            for move in moves:
                if (move.source, move.content) == (rank, what):
                    sent = {(move.vector, e) for e in range(move.start, move.end)}
                    assert sent <= having(shape, held, rank, what, zero1)
                    if what == "optimizer":
                        # A range that is held as a unit is sent as a unit.
                        kept = [having(shape, [entry], rank, what, zero1) for entry in held]
                        assert any(sent <= one for one in kept)
        own = {layer for layer, owners in owners_of_layer(world).items() if rank in owners}
        known = {entry.layer for entry in held if entry.rank == rank}
        assert sorted(m.layer for m in moves if (m.target, m.content) == (rank, "rest")) == sorted(
            own - known
        )
    assert all(m.source != m.target for m in moves)
    rest = {(entry.rank, entry.layer) for entry in held}
    assert all((m.source, m.layer) in rest for m in moves if m.content == "rest")


@settings(max_examples=100)
@given(shapes(), worlds())
def test_gather_ranges_cover_each_cell_once_and_match_the_parts(
    described: tuple[ParameterLayout, dict[str, ParameterSize]], drawn: WorldData
) -> None:
    shape, _ = described
    for world in (drawn, without_shards(drawn)):
        mine = optimizer_elements(shape, world)
        for number, vector in enumerate(shape.vectors):
            for cell in common_cells(world, vector.layers):
                begin, end = cell.elements(vector.numel)
                found = gather_ranges(vector, cell, world)
                assert tuple(sorted(found)) == cell.owners
                elements = [
                    e for ranges in found.values() for first, last in ranges for e in range(first, last)
                ]
                assert sorted(elements) == list(range(end - begin))
                for rank, ranges in found.items():
                    assert all(
                        (number, begin + e) in mine[rank]
                        for first, last in ranges
                        for e in range(first, last)
                    )


@settings(max_examples=100)
@given(worlds())
def test_owners_of_a_layer_divide_its_optimizer_state(world: WorldData) -> None:
    for layer, ranks in owners_of_layer(world).items():
        for zero1 in (False, True):
            speakers = [rank for rank in ranks if is_first_replica(stage_of(world, rank), rank)]
            parts = [
                (Fraction(start, of), Fraction(end, of))
                for rank in speakers
                for start, end, of in owned_parts(world, rank, layer, zero1=zero1)
            ]
            copies = 1 if zero1 else len(world.pipelines)
            assert sum((end - start for start, end in parts), Fraction(0)) == copies
        copied = replica_assignments(world, layer)
        assert len(world.pipelines) == 1 or {(one.owner, one.part) for one in copied} == {
            (rank, part) for rank in speakers for part in owned_parts(world, rank, layer, zero1=True)
        }
        for one in copied:
            # A rank that repeats updates has the gradients, because it has these elements itself.
            start, end, of = share_of(stage_of(world, one.holder), one.holder)
            assert Fraction(start, of) <= Fraction(one.part[0], one.part[2])
            assert Fraction(one.part[1], one.part[2]) <= Fraction(end, of)


def without_shards(world: WorldData) -> WorldData:
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(msgspec.structs.replace(s, within="replicate", replicas=1) for s in pipeline.stages),
        )
        for pipeline in world.pipelines
    )
    return msgspec.structs.replace(world, pipelines=pipelines)


def owned(world: WorldData) -> list[PartData]:
    return [
        _part(rank, layer, part, False, False)
        for layer, ranks in owners_of_layer(world).items()
        for rank in ranks
        for part in owned_parts(world, rank, layer, zero1=True)
    ]


def two(first: int) -> WorldPipeline:
    """Return a pipeline with layers 0–2 on rank ``first`` and 3–4 on the next rank."""
    return WorldPipeline(
        stages=(
            WorldStage(first_layer=0, end_layer=3, ranks=(first,)),
            WorldStage(first_layer=3, end_layer=5, ranks=(first + 1,)),
        ),
        first_microbatch=0,
        microbatches=1,
    )


def plain_shape() -> ParameterLayout:
    sizes = {f"{layer}.w": ParameterSize(numel=1000 + layer, dtype="float32") for layer in range(LAYERS)}
    return ParameterLayout.from_parameters({name: (int(name[0]),) for name in sizes}, sizes)


def test_sources_share_the_load() -> None:
    """A third pipeline joins two that are whole. Each old owner sends about as much as the other."""
    shape = plain_shape()
    world = WorldData(pipelines=(two(0), two(2), two(4)), transfers=(), hosts=("h",) * 6)
    held = [
        _part(rank, layer, (rank // 2, rank // 2 + 1, 2), False, True)
        for layer, ranks in owners_of_layer(world).items()
        for rank in ranks
        if rank < 4
    ]
    moves = plan_transfers(shape, world, held, zero1=True, replicas=False)
    sent: Counter[int] = Counter()
    for move in moves:
        sent[move.source] += move.end - move.start
    assert sent.total() > 5000
    for left, right in ((0, 2), (1, 3)):
        assert abs(sent[left] - sent[right]) <= 1002


def test_a_rank_that_restored_its_layers_needs_no_transfer() -> None:
    shape = plain_shape()
    world = WorldData(pipelines=(two(0), two(2)), transfers=(), hosts=("h",) * 4)
    assert plan_transfers(shape, world, initial_holdings(world), zero1=True, replicas=True) == ()
    parts = initial_holdings(world, zero1=True)
    assert plan_transfers(shape, world, parts, zero1=True, replicas=False, restored=True) == ()
    replicated = plan_transfers(shape, world, parts, zero1=True, replicas=True, restored=True)
    assert {move.content for move in replicated} == {"optimizer"}


def test_primaries_come_before_replicas() -> None:
    """Rank 0 has all of layers 0–2, half of it as a replica; rank 2 has that half. A third pipeline joins."""
    shape = plain_shape()
    world = WorldData(pipelines=(two(0), two(2), two(4)), transfers=(), hosts=("h",) * 6)
    held = [
        _part(rank, layer, (part, part + 1, 2), replica, False)
        for layers, ranks in ((range(3), (0, 2)), (range(3, 5), (1, 3)))
        for layer in layers
        for rank, part, replica in ((ranks[0], 0, False), (ranks[0], 1, True), (ranks[1], 1, False))
    ]
    moves = [
        m
        for m in plan_transfers(shape, world, held, zero1=True, replicas=False)
        if m.layer < 3 and m.target == 4
    ]
    for what in ("parameters", "optimizer"):
        assert {(m.source, m.start >= 500) for m in moves if m.content == what} <= {(0, False), (2, True)}
    assert {m.source for m in moves if m.content == "parameters"} == {0, 2}
