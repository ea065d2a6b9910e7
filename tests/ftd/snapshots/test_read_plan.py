"""Reading from several shards: any bytes that the owners present determine, and only from those owners."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.errors import PeerError
from ftd.snapshots.restoring.read_plan import (
    Read,
    ShardsUnusableError,
    execute_read,
    plan_read,
    recompute_shard,
)
from storage.codes import make_code
from storage.shards import Bytes, ShardLayout, make_shard


def random_bucket(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def shards_of(layout: ShardLayout, bucket: Bytes) -> dict[int, Bytes]:
    made = {}
    for owner in range(layout.code.owners):
        made[owner] = np.empty(layout.shard_bytes(owner), dtype=np.uint8)
        make_shard(layout, owner, bucket, made[owner])
    return made


def reader_of(shards: dict[int, Bytes], present: frozenset[int]) -> Read:
    async def read(owner: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
        assert owner in present
        for offset, memory in pieces:
            memory[:] = shards[owner][offset : offset + len(memory)]

    return read


@settings(max_examples=60)
@given(
    scheme=st.sampled_from(["arc:1", "arc:2", "aec", "aec2", "aec+arc:1", "aec2+arc:1"]),
    owners=st.integers(2, 6),
    size=st.integers(1, 3000),
    data=st.data(),
)
def test_any_range_is_read_from_the_owners_that_are_present(
    scheme: str, owners: int, size: int, data: st.DataObject
) -> None:
    layout = ShardLayout(code=make_code(scheme, owners), bucket_bytes=size)
    bucket = random_bucket(size)
    lost = data.draw(st.sets(st.integers(0, owners - 1), max_size=layout.code.guarantee))
    present = frozenset(range(owners)) - lost
    first = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(first + 1, size))
    plan = plan_read(layout, present, first, end)
    found = np.full(plan.size_bytes, 255, dtype=np.uint8)
    fetched = asyncio.run(execute_read(plan, found, {}, reader_of(shards_of(layout, bucket), present)))
    assert np.array_equal(found, bucket[first:end])
    assert fetched == sum(len(some) for ranges in plan.read().values() for some in ranges)


@settings(max_examples=60)
@given(
    scheme=st.sampled_from(["aec", "aec2", "arc:1", "aec+arc:1"]),
    owners=st.integers(2, 6),
    size=st.integers(1, 3000),
    data=st.data(),
)
def test_any_bytes_of_any_shard_are_recomputed_from_the_others(
    scheme: str, owners: int, size: int, data: st.DataObject
) -> None:
    layout = ShardLayout(code=make_code(scheme, owners), bucket_bytes=size)
    shards = shards_of(layout, random_bucket(size))
    owner = data.draw(st.integers(0, owners - 1))
    lost = {owner}
    if layout.code.guarantee > 1:
        lost.add(data.draw(st.integers(0, owners - 1)))
    present = frozenset(range(owners)) - lost
    first = data.draw(st.integers(0, len(shards[owner]) - 1))
    end = data.draw(st.integers(first + 1, len(shards[owner])))
    found = np.full(end - first, 255, dtype=np.uint8)
    used = asyncio.run(recompute_shard(layout, owner, present, first, found, reader_of(shards, present)))
    assert used <= present
    assert np.array_equal(found, shards[owner][first:end])


def test_all_owners_that_fail_are_named_with_their_reasons() -> None:
    layout = ShardLayout(code=make_code("arc:2", 4), bucket_bytes=1000)

    async def read(owner: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
        if owner != 1:
            raise PeerError(f"owner {owner} does not answer")

    plan = plan_read(layout, frozenset(range(4)), 0, 1000)
    with pytest.raises(ShardsUnusableError) as failed:
        asyncio.run(execute_read(plan, np.empty(plan.size_bytes, dtype=np.uint8), {}, read))
    assert [(owner, str(why)) for owner, why in failed.value.owners] == [
        (owner, f"owner {owner} does not answer") for owner in (0, 2, 3)
    ]
