"""Codes and their bytes: losses within the guarantee are decoded exactly, and others are reported."""

from itertools import combinations

import numpy as np
import pytest

from storage.codes import Code, has_buddy, make_code, parse_scheme, solve_lost_cells
from storage.errors import TooManyLossesError
from storage.shards import Bytes, Fetch, ShardLayout, decode_bucket, make_shard, xor_into

SCHEMES = ("none", "arc:1", "arc:2", "aec", "aec2", "aec+arc:1", "aec2+arc:1")


def shards_of(layout: ShardLayout, bucket: Bytes) -> dict[int, Bytes]:
    made = {}
    for owner in range(layout.code.owners):
        # The bytes are not zero, so that bytes that were not written show.
        made[owner] = np.full(layout.shard_bytes(owner), 0xAA, dtype=np.uint8)
        make_shard(layout, owner, bucket, made[owner])
    return made


def reader_of(shards: dict[int, Bytes]) -> Fetch:
    return lambda owner, offset, size: shards[owner][offset : offset + size]


def random_bucket(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("owners", range(1, 7))
@pytest.mark.parametrize("size", [0, 1, 63, 1000, 40_001])
def test_every_loss_within_the_guarantee_is_decoded_exactly(scheme: str, owners: int, size: int) -> None:
    layout = ShardLayout(code=make_code(scheme, owners), bucket_bytes=size)
    bucket = random_bucket(size)
    shards = shards_of(layout, bucket)
    everybody = frozenset(range(owners))
    for losses in range(layout.code.guarantee + 1):
        for lost in combinations(everybody, losses):
            left = {owner: shard for owner, shard in shards.items() if owner not in lost}
            found = np.zeros(size, dtype=np.uint8)
            decode_bucket(layout, frozenset(left), reader_of(left), found)
            assert np.array_equal(found, bucket), (lost, losses)


@pytest.mark.parametrize(
    ("scheme", "owners", "guarantee"),
    [
        ("none", 5, 0),
        ("arc:1", 2, 1),
        ("arc:2", 5, 2),
        ("arc:4", 3, 2),
        *[("aec", m, 1) for m in range(2, 9)],
        *[("aec2", m, 2) for m in range(3, 9)],
        ("aec2", 2, 1),
        *[("aec+arc:1", m, 2) for m in range(3, 9)],
        ("aec2+arc:1", 5, 3),
        ("aec2", 1, 0),
    ],
)
def test_the_guarantee(scheme: str, owners: int, guarantee: int) -> None:
    assert make_code(scheme, owners).guarantee == guarantee


@pytest.mark.parametrize("owners", range(3, 9))
def test_what_a_scheme_costs(owners: int) -> None:
    assert make_code("aec", owners).overhead == pytest.approx(1 / (owners - 1))
    assert make_code("aec2", owners).overhead == pytest.approx(2 / (owners - 2))
    assert make_code("arc:2", owners).overhead == 2


@pytest.mark.parametrize("scheme", ["aec", "aec2"])
@pytest.mark.parametrize("owners", range(3, 8))
def test_owners_hold_equal_amounts_and_no_parity_of_their_own_cells(scheme: str, owners: int) -> None:
    """Parity of one's own cells would be lost together with them."""
    code = make_code(scheme, owners)
    assert len({len(kept) for kept in code.extra}) == 1
    for owner, kept in enumerate(code.extra):
        if scheme == "aec":
            assert not any(cell in code.segment(owner) for cells in kept for cell in cells)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_beyond_the_guarantee_it_is_either_exact_or_an_error(scheme: str) -> None:
    layout = ShardLayout(code=make_code(scheme, 5), bucket_bytes=5000)
    bucket = random_bucket(5000)
    shards = shards_of(layout, bucket)
    refused = 0
    for losses in range(layout.code.guarantee + 1, 6):
        for lost in combinations(range(5), losses):
            left = {owner: shard for owner, shard in shards.items() if owner not in lost}
            found = np.zeros(5000, dtype=np.uint8)
            try:
                decode_bucket(layout, frozenset(left), reader_of(left), found)
            except TooManyLossesError as error:
                refused += 1
                assert str(sorted(lost)) in str(error)
            else:
                assert np.array_equal(found, bucket)
    assert refused


def test_decoding_never_reads_from_lost_owners() -> None:
    code: Code = make_code("aec2", 6)
    for lost in combinations(range(6), 2):
        made = solve_lost_cells(code, frozenset(lost))
        assert made is not None
        assert not any(stored.owner in lost for sources in made.values() for stored in sources)


@pytest.mark.parametrize(("start", "size"), [(0, 64), (1, 63), (3, 1), (8, 0), (0, 9)])
def test_xor_of_any_alignment(start: int, size: int) -> None:
    target, source = random_bucket(100), random_bucket(101)[1:]
    expected = target.copy()
    expected[start : start + size] ^= source[:size]
    xor_into(target[start : start + size], source[:size])
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(
    "written",
    ["", "arc", "arc:0", "arc:x", "aec:1", "raid6", "none+aec", "aec++arc:1", "AEC", "buddy:1", "none+buddy"],
)
def test_an_unknown_scheme_is_rejected(written: str) -> None:
    with pytest.raises(ValueError, match="none"):
        parse_scheme(written)


@pytest.mark.parametrize("owners", [1, 2, 3, 5])
def test_the_buddy_scheme_does_not_change_what_owners_hold(owners: int) -> None:
    assert make_code("aec+buddy", owners) == make_code("aec", owners)
    assert make_code("buddy", owners) == make_code("none", owners)
    assert has_buddy("aec + buddy") and not has_buddy("aec2+arc:1")


def test_too_many_owners_for_aec2_are_rejected() -> None:
    with pytest.raises(ValueError, match="up to 16 owners"):
        make_code("aec2", 17)
