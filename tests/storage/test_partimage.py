"""Parts of a layer in a snapshot: whatever their number, together they make the ordinary layer."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptDataError
from storage.layerstate import decode_header
from storage.partimage import (
    Bytes,
    LayerPart,
    PartImage,
    ShardedImage,
    assemble_from_parts,
    find_bytes,
    find_tensors,
)
from tests.helpers.part_images import SCHEDULE, layer_of, part_of

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@st.composite
def covers(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Draw ranges of fractions that cover [0, 1), parts of it perhaps more than once."""
    of = draw(st.integers(1, 6))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, of - 1)))), of] if of > 1 else [0, 1]
    ranges = [(start, end, of) for start, end in pairwise(cuts)]
    parts = draw(st.integers(1, 4))
    ranges += [(part, part + 1, parts) for part in draw(st.sets(st.integers(0, parts - 1)))]
    return draw(st.permutations(ranges))


@given(sizes, covers())
def test_parts_that_cover_a_layer_assemble_it_however_it_was_cut(
    counts: list[int], ranges: list[tuple[int, int, int]]
) -> None:
    whole = layer_of(counts)
    header_bytes, payload = assemble_from_parts(whole, [part_of(counts, *one) for one in ranges])
    assert (header_bytes, payload.tobytes()) == tuple(
        bytes(one) for one in assemble_from_parts(whole, [part_of(counts, 0, 1, 1)])
    )
    header = decode_header(header_bytes, 7, len(payload))
    found = {
        (entry.name, entry.key): np.frombuffer(
            payload[entry.offset : entry.offset + entry.size_bytes].tobytes(), dtype=np.float32
        )
        for entry in header.entries
    }
    begin = 0
    for number, count in enumerate(counts):
        assert found[f"w{number}", ""].tolist() == list(range(begin, begin + count))
        assert found[f"w{number}", "exp_avg"].tolist() == list(range(begin + 1000, begin + count + 1000))
        assert found[f"w{number}", "step"].tolist() == [5.0]
        begin += count
    assert found["mean", ""].tolist() == [0.0, 1.0, 2.0]
    assert header.scalars == {f"w{n}": {"seen": 5} for n in range(len(counts))}
    assert header.schedule == SCHEDULE


@given(sizes, st.integers(1, 5), st.integers(1, 5), st.booleans(), st.data())
def test_any_bytes_of_a_part_are_made_from_other_parts(
    counts: list[int], owners: int, others: int, replica: bool, data: st.DataObject
) -> None:
    """The test holds for any cut of the source and of the target."""

    def image_of(owner: int, owners: int, *, replica: bool) -> tuple[PartImage, Bytes]:
        layer_part, made = part_of(counts, owner, owner + 1, owners)
        image = PartImage(
            start=owner,
            end=owner + 1,
            of=owners,
            replica=replica,
            offset=0,
            size_bytes=len(made),
            layers=(layer_part,),
        )
        return image, made

    wanted, expected = image_of(data.draw(st.integers(0, owners - 1)), owners, replica=False)
    there = [image_of(other, others, replica=replica) for other in range(others)]
    first = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(first, len(expected)))
    made = np.zeros(end - first, dtype=np.uint8)
    assert find_tensors([wanted], first, end, replica=True) == []
    for at, some in find_tensors([wanted], first, end, replica=False):
        left = some
        while left.start < left.end:
            found = [(find_bytes([image], left), bytes_) for image, bytes_ in there]
            (where, offset, size), bytes_ = next((one, kept) for one, kept in found if one is not None)
            assert where == replica
            done = at + left.start - some.start
            made[done : done + size] = bytes_[offset : offset + size]
            left = replace(left, start=left.start + size)
    assert made.tobytes() == expected[first:end].tobytes()


Pieces = list[tuple[LayerPart, Bytes]]


def without_one(pieces: Pieces) -> Pieces:
    return pieces[:1]


def another_step(pieces: Pieces) -> Pieces:
    """Return the parts, the second of which is at another step for the parameter that both contain."""
    (first, data), (second, other) = pieces
    changed = other.copy()
    run = next(run for run in second.ranges if run.key == "step")
    changed[run.offset : run.offset + 4] = np.frombuffer(np.float32(6.0).tobytes(), dtype=np.uint8)
    return [(first, data), (second, changed)]


def another_layer(pieces: Pieces) -> Pieces:
    return [(msgspec.structs.replace(pieces[0][0], layer=8), pieces[0][1]), pieces[1]]


def shorter(pieces: Pieces) -> Pieces:
    return [(pieces[0][0], pieces[0][1][:-1]), pieces[1]]


@pytest.mark.parametrize("damage", [without_one, another_step, another_layer, shorter])
def test_parts_that_do_not_make_up_the_layer_are_rejected(damage: Callable[[Pieces], Pieces]) -> None:
    pieces = [part_of([10], part, part + 1, 2) for part in range(2)]
    with pytest.raises(CorruptDataError, match="layer"):
        assemble_from_parts(layer_of([10]), damage(pieces))


def image() -> ShardedImage:
    layer_part, data = part_of([10], 0, 1, 2)
    held = PartImage(
        start=0, end=1, of=2, replica=False, offset=0, size_bytes=len(data), layers=(layer_part,)
    )
    return ShardedImage(layers=(layer_of([10]),), held=(held,))


def test_the_small_part_survives_a_round_trip() -> None:
    assert ShardedImage.from_bytes(image().to_bytes()) == image()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"held": (msgspec.structs.replace(image().held[0], end=3),)},
        {"held": (msgspec.structs.replace(image().held[0], end=0),)},
        {"held": (msgspec.structs.replace(image().held[0], offset=8),)},
        {"held": (image().held[0], image().held[0])},
        {"held": (msgspec.structs.replace(image().held[0], size_bytes=1),)},
        {"held": (msgspec.structs.replace(image().held[0], layers=()),)},
    ],
)
def test_an_inconsistent_small_part_of_parts_is_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        ShardedImage.from_bytes(msgspec.structs.replace(image(), **changes).to_bytes())
    with pytest.raises(CorruptDataError, match="malformed"):
        ShardedImage.from_bytes(image().to_bytes()[:-3])
