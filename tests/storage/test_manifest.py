"""The digests of a part: however its bytes are split, one for each block, and consistent with each other."""

import random
from dataclasses import dataclass

import msgspec
import pytest

from storage.errors import CorruptDataError
from storage.manifest import (
    BLOCK_BYTES,
    PartDigester,
    SnapshotManifest,
    SnapshotPart,
    check_parts,
    digest_of,
    digests_of_blocks,
)


@dataclass(frozen=True)
class Case:
    size_bytes: int
    blocks: int


CASES = [
    Case(0, 0),
    Case(1, 0),
    Case(BLOCK_BYTES, 0),
    Case(BLOCK_BYTES + 1, 2),
    Case(2 * BLOCK_BYTES, 2),
    Case(3 * BLOCK_BYTES - 7, 3),
    Case(37 * BLOCK_BYTES + 5, 38),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.size_bytes))
def test_digests_do_not_depend_on_how_the_bytes_are_split(case: Case) -> None:
    chance = random.Random(case.size_bytes)
    data = chance.randbytes(case.size_bytes)
    digests, done = PartDigester(), 0
    while done < len(data):
        some = data[done : done + chance.randrange(1, BLOCK_BYTES)]
        digests.update(some)
        done += len(some)
    part = digests.part("it", 64)
    assert part == SnapshotPart.from_bytes("it", 64, data) and part.is_intact(data)
    assert len(part.blocks) == 16 * case.blocks and part.in_blocks
    assert part.digest == digest_of(part.blocks.encode() if case.blocks else data)
    check_parts(manifest_of(part), 64 + len(data))


def test_whole_blocks_are_added_by_their_digests() -> None:
    data = random.Random(1).randbytes(5 * BLOCK_BYTES + 9)
    digests = PartDigester()
    digests.update(data[:BLOCK_BYTES])
    digests.add_blocks(digests_of_blocks(data[BLOCK_BYTES : 4 * BLOCK_BYTES]))
    digests.update(data[4 * BLOCK_BYTES :])
    assert digests.part("it", 64) == SnapshotPart.from_bytes("it", 64, data)


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: str(case.size_bytes))
def test_a_changed_byte_is_found_in_its_block(case: Case) -> None:
    data = bytearray(random.Random(case.size_bytes).randbytes(case.size_bytes))
    part = SnapshotPart.from_bytes("it", 0, data)
    for place in (0, len(data) // 2, len(data) - 1):
        data[place] ^= 1
        assert not part.is_intact(data)
        numbers = part.blocks_covering(0, len(data))
        bad = [n for n in numbers if not part.is_block_intact(n, data[slice(*part.block(n))])]
        assert bad == list(part.blocks_covering(place, place + 1))
        data[place] ^= 1
    assert part.is_intact(data)


def test_inconsistent_digests_are_rejected() -> None:
    part = SnapshotPart.from_bytes("it", 0, bytes(2 * BLOCK_BYTES))
    other = SnapshotPart.from_bytes("it", 0, bytes(3 * BLOCK_BYTES))
    for wrong, says in (
        (msgspec.structs.replace(part, blocks=part.blocks[:16]), "digests of 2 blocks"),
        (msgspec.structs.replace(part, size_bytes=5, blocks=part.blocks), "digests of 0 blocks"),
        (msgspec.structs.replace(part, digest=other.digest), "the digest of its blocks"),
    ):
        with pytest.raises(CorruptDataError, match=says):
            check_parts(manifest_of(wrong), 4 * BLOCK_BYTES)


def manifest_of(part: SnapshotPart) -> SnapshotManifest:
    return SnapshotManifest(job_id="job", step=1, generation=1, slot=0, parts=(part,), layout={})
