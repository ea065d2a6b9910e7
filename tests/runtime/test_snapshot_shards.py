"""Tests of shards made from scattered tensors: they equal those of one contiguous bucket; what is written and
when.
"""

import contextlib
import math
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.snapshots.capture import TrainerCapture
from runtime.snapshots.groups import layer_groups, split_evenly
from runtime.snapshots.movers import DeviceMover, Mover
from runtime.snapshots.schedule import CopySchedule, StepTimes
from runtime.snapshots.shard_units import ShardUnit, SnapshotBucket, shard_units, source_of
from runtime.streaming_stores import streaming_environment
from statemachine.messages.trainer import WorldData
from statemachine.messages.values import Vote
from storage.codes import make_code
from storage.manifest import BLOCK_BYTES, SnapshotPart
from storage.shards import Bytes, ShardLayout, make_shard
from tests.helpers.harness import pipeline

UNIT_BYTES = CopySchedule().unit_bytes


class HostStreams:
    """A device in host memory, whose side stream executes every operation at once."""

    def __init__(self) -> None:
        self.asked = self.finished = 0

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.asked += 1
        yield

    def finish(self, devices: set[torch.device]) -> None:
        self.finished = self.asked


def check(sizes: list[int], scheme: str, owners: int, streams: HostStreams | None = None) -> None:
    random = np.random.default_rng(1)
    bucket, plain = (
        SnapshotBucket(Mover() if streams is None else DeviceMover(torch.device("cpu"), streams)),
        b"",
    )
    for number, size in enumerate(sizes):
        values = random.integers(0, 256, size, dtype=np.uint8)
        tensor = torch.from_numpy(values)
        # Even with a device, some tensors are in host memory.
        on_host = streams is None or number % 3 == 1
        bucket.add(source_of(tensor) if on_host else tensor, size + -size % 16)
        plain += values.tobytes() + bytes(-size % 16)
    assert bucket.size_bytes == len(plain)
    layout = ShardLayout(code=make_code(scheme, owners), bucket_bytes=len(plain))
    for owner in range(owners):
        expected = np.zeros(layout.shard_bytes(owner), dtype=np.uint8)
        make_shard(layout, owner, np.frombuffer(plain, dtype=np.uint8), expected)
        # Old content of the slot must not remain in the gaps.
        slot = np.full(64 + layout.shard_bytes(owner), 0xA5, dtype=np.uint8)
        units = shard_units(layout, owner, bucket, 64, UNIT_BYTES)
        for unit in reversed(units):
            assert unit.read_bytes <= max(UNIT_BYTES, 64 * len(unit.starts))
            unit.write(slot)
            assert streams is None or streams.finished == streams.asked, "bytes are still under way"
        assert slot[64:].tobytes() == expected.tobytes()
        assert (slot[:64] == 0xA5).all()
        if streams is None:
            check_digests(units, expected)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("scheme", ["none", "aec", "aec2", "aec+arc:1"])
def test_frozen_blocks_stay_in_the_slot(scheme: str, pooled: bool) -> None:
    """The second snapshot copies only the other blocks, and has the digests of all, which a pool computes."""
    pool = ThreadPoolExecutor(2)
    random = np.random.default_rng(1)
    owners, mib = 4, 1024 * 1024
    sizes = [(7 * mib, True), (112, False), (9 * mib + 16, True), (2 * mib, False), (5 * mib, True)]
    values = [random.integers(0, 256, size, dtype=np.uint8) for size, _ in sizes]
    left_out = hashed = 0
    for owner in range(owners):
        slot = None
        parts: tuple[SnapshotPart, ...] = ()
        for _ in range(2):
            bucket = SnapshotBucket(Mover())
            for value, (size, frozen) in zip(values, sizes, strict=True):
                bucket.add(source_of(torch.from_numpy(value)), size, frozen=frozen)
            layout = ShardLayout(code=make_code(scheme, owners), bucket_bytes=bucket.size_bytes)
            size_bytes = layout.shard_bytes(owner)
            capture = TrainerCapture(
                generation=1, step=1, vote=Vote(loss=0.0, gradient_norm=0.0), unit_bytes=3 * mib // 2
            )
            capture.add_shard("shard", layout.code, owner, bucket)
            assert sum(unit.size_bytes for unit in capture.units) == size_bytes
            if slot is None:
                slot = np.full(size_bytes, 0xA5, dtype=np.uint8)
            else:
                capture.skip_frozen(parts)
                left_out += size_bytes - sum(unit.size_bytes for unit in capture.units)
            capture.slot = slot
            for unit in capture.units:
                if pooled:
                    unit.write(slot)
                    capture.hash_unit(unit, pool)
                else:
                    unit.write(slot, capture.digests_at(unit))
            parts = capture.parts()
            hashed += sum(len(run.result()) for run in capture.hashed.values())
            expected = np.zeros(size_bytes, dtype=np.uint8)
            make_shard(layout, owner, np.concatenate(values), expected)
            assert slot.tobytes() == expected.tobytes()
            assert parts == (SnapshotPart.from_bytes("shard", 0, expected),)
            for value, (_, frozen) in zip(values, sizes, strict=True):
                if not frozen:
                    np.bitwise_xor(value, 0x5A, out=value)
    assert left_out > 4 * mib
    assert hashed > 10 if pooled else hashed == 0
    pool.shutdown()


def check_digests(units: list[ShardUnit], expected: Bytes) -> None:
    """Check that digests are computed while copying, until another thread copies a unit, and the rest
    afterwards.
    """
    capture = TrainerCapture(
        generation=1, step=1, vote=Vote(loss=0.0, gradient_norm=0.0), unit_bytes=UNIT_BYTES, units=units
    )
    capture.shards.append(("shard", 64, len(expected)))
    slot = capture.slot = np.full(64 + len(expected), 0xA5, dtype=np.uint8)
    helped = 3 if len(units) > 3 else len(units)
    for number, unit in enumerate(units):
        digests = None if number == helped else capture.digests_at(unit)
        assert (digests is None) == (number >= helped)
        unit.write(slot, digests)
    (part,) = capture.parts()
    assert part == SnapshotPart.from_bytes(part.name, 64, expected) and part.is_intact(expected)
    numbers = part.blocks_covering(0, part.size_bytes)
    assert bool(part.blocks) == (part.size_bytes > BLOCK_BYTES) and part.in_blocks
    assert all(part.is_block_intact(number, expected[slice(*part.block(number))]) for number in numbers)


SCHEMES = st.sampled_from(["none", "arc:1", "aec", "aec2", "aec+arc:1"])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 200), max_size=12), SCHEMES, st.integers(1, 5))
def test_units_make_the_shard(sizes: list[int], scheme: str, owners: int) -> None:
    check(sizes, scheme, owners)


LARGE = [3 * UNIT_BYTES + 7, 4, BLOCK_BYTES - 1, 5, 2 * UNIT_BYTES]


def test_units_make_large_shards() -> None:
    check(LARGE, "aec", 3)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200), max_size=12), SCHEMES, st.integers(1, 5))
def test_units_are_made_on_a_device_as_well(sizes: list[int], scheme: str, owners: int) -> None:
    check(sizes, scheme, owners, HostStreams())


def test_large_parity_is_made_on_the_device() -> None:
    streams = HostStreams()
    check(LARGE, "aec2", 4, streams)
    assert streams.asked > 20


def test_large_copies_use_streaming_stores_unless_the_user_chose_a_limit() -> None:
    here = streaming_environment({})
    if platform.machine() != "x86_64":
        assert here == {}
        return
    assert here == {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000"}
    more = streaming_environment({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert more["GLIBC_TUNABLES"].startswith("glibc.malloc.check=1:glibc.cpu.")
    assert streaming_environment(here) == {}


def test_memory_with_gaps_is_gathered_row_major() -> None:
    tensor = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    turned = source_of(tensor.t())
    assert isinstance(turned, np.ndarray)
    assert turned.tobytes() == tensor.t().contiguous().numpy().tobytes()
    plain = source_of(tensor)
    assert isinstance(plain, np.ndarray) and np.shares_memory(plain, tensor.numpy())


WORLD = WorldData(
    pipelines=(
        pipeline((0, 2, [0, 1]), (2, 5, [2]), first_microbatch=0, microbatches=1),
        pipeline((0, 3, [3]), (3, 5, [5, 4]), first_microbatch=1, microbatches=1),
    ),
    transfers=(),
    hosts=("127.0.0.1",) * 6,
)
NODES = ("a", "a", "b", "c", "d", "d")


@pytest.mark.parametrize(
    ("rank", "expected", "coupled"),
    [
        (0, [(0, 1, ("a", "c"), 0)], [(0, 2, ("a", "c"), 0)]),
        (1, [(1, 2, ("a", "c"), 0)], []),
        (
            2,
            [(2, 3, ("b", "c"), 0), (3, 4, ("b", "d"), 0), (4, 5, ("b", "d"), 0)],
            [(2, 3, ("b", "c"), 0), (3, 5, ("b", "d"), 0)],
        ),
        (
            3,
            [(0, 1, ("a", "c"), 1), (1, 2, ("a", "c"), 1), (2, 3, ("b", "c"), 1)],
            [(0, 2, ("a", "c"), 1), (2, 3, ("b", "c"), 1)],
        ),
        (4, [(3, 4, ("b", "d"), 1)], [(3, 5, ("b", "d"), 1)]),
        (5, [(4, 5, ("b", "d"), 1)], []),
    ],
)
def test_groups_are_cut_where_a_pipeline_is_and_shared_out_among_devices(
    rank: int, expected: list[tuple[int, int, tuple[str, ...], int]], coupled: list[object]
) -> None:
    groups = layer_groups(WORLD, NODES, rank, "aec", [1] * 5)
    assert [(g.first_layer, g.end_layer, g.owners, g.owner) for g in groups] == expected
    assert all(g.code == make_code("aec", 2) for g in groups)
    assert layer_groups(WORLD, (), rank, "aec", [1] * 5) == ()
    alone = layer_groups(WORLD, NODES, rank, "aec", [1] * 5, coupled=True)
    assert [(g.first_layer, g.end_layer, g.owners, g.owner) for g in alone] == coupled


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=9),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_devices_of_each_stage_share_all_layers(
    sizes: list[int], devices: list[int], zero1: bool
) -> None:
    """For stages of any numbers of devices, all cut the layers in the same way, and every layer is with one
    device of each stage.
    """
    ends = list(accumulate(devices, initial=0))
    stages = [list(range(first, end)) for first, end in pairwise(ends)]
    world = WorldData(
        pipelines=tuple(
            pipeline((0, len(sizes), ranks), first_microbatch=n, microbatches=1)
            for n, ranks in enumerate(stages)
        ),
        transfers=(),
        hosts=("127.0.0.1",) * ends[-1],
    )
    nodes = tuple(f"node-{number}" for number, ranks in enumerate(stages) for _ in ranks)
    scheme = "arc:1+aor" if zero1 else "none"
    cuts = set()
    for owner, ranks in enumerate(stages):
        kept = [layer_groups(world, nodes, rank, scheme, sizes, zero1=zero1) for rank in ranks]
        own = sorted((g.first_layer, g.end_layer) for some in kept for g in some if g.own)
        assert [n for first, end in own for n in range(first, end)] == list(range(len(sizes)))
        cuts.add(tuple(own))
        assert all(g.owner == owner and g.parted == zero1 for some in kept for g in some)
        used = [any(g.own for g in some) for some in kept]
        assert sum(used) == min(len(ranks), len(sizes))
        # Only the lowest rank has the next owner's replica, which covers all layers.
        replicas = [[n for g in some if g.replica for n in g.layers] for some in kept]
        expected = list(range(len(sizes))) if zero1 and len(stages) > 1 else []
        assert replicas == [expected, *[[]] * (len(ranks) - 1)]
    assert len(cuts) == 1 and len(cuts.pop()) == min(max(devices), len(sizes))


def test_each_device_of_a_sharded_stage_saves_its_parts_of_all_layers() -> None:
    """If any owner is sharded, those that are not share the layers, also without a code."""
    first, second = (msgspec.structs.replace(stage, within="shard") for stage in WORLD.pipelines[0].stages)
    sharding = msgspec.structs.replace(WORLD.pipelines[0], stages=(first, second))
    world = msgspec.structs.replace(WORLD, pipelines=(sharding, WORLD.pipelines[1]))
    found = [
        [
            (g.name, g.end_layer, g.owner, g.parted)
            for g in layer_groups(world, NODES, rank, "arc:1", [1] * 5)
            if g.own and not g.replica
        ]
        for rank in range(6)
    ]
    assert found == [
        [("group-0", 2, 0, True)],
        [("group-0.1", 2, 0, True)],
        # A stage of one device has nothing to shard.
        [("group-2", 3, 0, False), ("group-3", 4, 0, False), ("group-4", 5, 0, False)],
        [("group-0", 1, 1, True), ("group-1", 2, 1, True), ("group-2", 3, 1, False)],
        [("group-3", 4, 1, False)],
        [("group-4", 5, 1, False)],
    ]


def test_shares_are_about_equal() -> None:
    assert split_evenly([1, 1, 1, 1], 2) == [0, 2, 4]
    assert split_evenly([9, 1, 1, 1], 2) == [0, 1, 4]
    assert split_evenly([1, 1, 1, 9], 3) == [0, 2, 3, 4]
    assert split_evenly([0, 0, 0], 3) == [0, 1, 2, 3]
    assert split_evenly([5, 5, 5, 5, 5], 1) == [0, 5]


def at(step_s: float, waits_s: float, sync_s: float = 0.0) -> StepTimes:
    return StepTimes(step_s=step_s, waits_s=waits_s, sync_s=sync_s)


def test_computing_is_interrupted_only_for_what_does_not_fit_into_bubbles() -> None:
    schedule = CopySchedule()
    assert schedule.may_copy(1, at(0.0, 0.0), bubble=True)
    assert schedule.may_copy(0, at(0.0, 0.0), bubble=False), "nothing is known yet"
    schedule.record_copy(1000, 1.0)
    assert schedule.may_copy(1, at(0.0, 0.0), bubble=False)
    for waits_s in (0.4, 0.6):
        schedule.record_step(at(2.0, waits_s, 0.3))
    assert schedule.bandwidth == 1000
    assert not schedule.may_copy(399, at(0.0, 0.0), bubble=False)
    assert schedule.may_copy(401, at(0.0, 0.0), bubble=False)
    assert schedule.may_copy(399, at(0.0, 0.1), bubble=False), "part of the bubbles is over"
    assert schedule.may_copy(399, at(1.6, 0.0), bubble=False), "the step ends before"
    schedule.discount()
    schedule.record_copy(3000, 0.5)
    assert math.isclose(schedule.bandwidth, 3500)
    assert not schedule.may_copy(1399, at(0.0, 0.0), bubble=False)


def test_digests_are_made_while_copying_if_the_step_takes_longer() -> None:
    host, device = CopySchedule(), CopySchedule(has_own_link=True)
    assert not host.has_time(0, 0.0), "nothing is known yet"
    for schedule in (host, device):
        schedule.record_copy(1000, 1.0)
        schedule.record_step(at(2.0, 0.0))
    assert host.has_time(1500, 0.0)
    assert not host.has_time(1700, 0.0)
    assert not host.has_time(1500, 0.5)
    assert not host.has_time(1, 2.1), "the step should have ended"
    assert not device.has_time(1, 0.0)


def test_on_a_device_sums_are_disturbed_last() -> None:
    host, device = CopySchedule(), CopySchedule(has_own_link=True)
    for schedule in (host, device):
        schedule.record_copy(1000, 1.0)
        schedule.record_step(at(2.0, 0.5, 0.3))
    assert host.is_bubble(waiting=True, for_sums=True)
    assert not device.is_bubble(waiting=True, for_sums=True)
    assert device.is_bubble(waiting=True, for_sums=False)
    assert not device.is_bubble(waiting=False, for_sums=False)
    # There are 0.2 s of bubbles, of which 0.16 s are relied on; with the sums there would be 0.4 s.
    assert not host.may_copy(200, at(0.0, 0.0), bubble=False)
    assert device.may_copy(200, at(0.0, 0.0), bubble=False)
    assert not device.may_copy(150, at(0.0, 0.0), bubble=False)
    assert not device.may_copy(150, at(0.0, 0.3, 0.3), bubble=False), "the vote will do"
    assert device.may_copy(150, at(0.0, 0.5, 0.3), bubble=False), "left by both others"


@given(st.floats(1.0, 1e12), st.floats(1e-6, 1e3), st.booleans())
def test_units_follow_the_bandwidth_within_limits(copied: float, seconds: float, has_own_link: bool) -> None:
    schedule = CopySchedule(has_own_link=has_own_link)
    schedule.record_copy(int(copied), seconds)
    size = schedule.unit_bytes
    most, longest_s = (128 << 20, 0.002) if has_own_link else (16 << 20, 0.0005)
    assert 1 << 20 <= size <= most and size % 64 == 0
    if 1 << 20 < size < most:
        assert size / schedule.bandwidth <= longest_s
