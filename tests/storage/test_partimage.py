"""Parts of a layer in a snapshot: whatever their number, all of them together are the ordinary layer."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import DamagedError
from storage.layerstate import decode_header
from storage.partimage import (
    Bytes,
    PartImage,
    PartOfLayer,
    Run,
    ShardedImage,
    Tensor,
    WholeLayer,
    assemble,
    padded,
)

SCHEDULE: dict[str, Any] = {"groups": [{"lr": 0.1}]}


def layer_of(counts: list[int]) -> WholeLayer:
    """Parameters ``w0``, ``w1``, … of so many elements, and a buffer of three in the middle."""
    tensors = [
        Tensor(name=f"w{n}", role="parameter", dtype="float32", shape=(count,), on_host=True)
        for n, count in enumerate(counts)
    ]
    buffer = Tensor(name="mean", role="buffer", dtype="float32", shape=(3,), on_host=True)
    tensors.insert(1, buffer)
    data = np.arange(3, dtype=np.float32).tobytes()
    return WholeLayer(
        layer=7, tensors=tuple(tensors), schedule=SCHEDULE, buffers=data.ljust(padded(len(data)), b"\0")
    )


def part_of(counts: list[int], part: int, parts: int) -> tuple[PartOfLayer, Bytes]:
    """Values, a moment of each (1000 more), and a step of each parameter that it has."""
    runs: list[Run] = []
    pieces: list[bytes] = []
    scalars: dict[str, dict[str, Any]] = {}
    total, begin = sum(counts), 0
    low, high = total * part // parts, total * (part + 1) // parts

    def add(name: str, key: str, values: np.ndarray, start: int, count: int | None) -> None:
        data = values.astype(np.float32).tobytes()
        runs.append(
            Run(
                name=name,
                role="optimizer" if key else "parameter",
                key=key,
                dtype="float32",
                on_host=True,
                start=start,
                count=count,
                offset=sum(map(len, pieces)),
                size_bytes=len(data),
            )
        )
        pieces.append(data.ljust(padded(len(data)), b"\0"))

    for number, count in enumerate(counts):
        start, end = max(low, begin) - begin, min(high, begin + count) - begin
        if start < end:
            name, values = f"w{number}", np.arange(begin + start, begin + end)
            add(name, "", values, start, end - start)
            add(name, "exp_avg", values + 1000, start, end - start)
            add(name, "step", np.array([5.0]), 0, None)
            scalars[name] = {"seen": 5}
        begin += count
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    told = PartOfLayer(layer=7, offset=0, size_bytes=len(data), runs=tuple(runs), scalars=scalars)
    return told, data


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(sizes, st.integers(1, 6))
def test_all_parts_make_the_layer_whatever_their_number(counts: list[int], parts: int) -> None:
    whole = layer_of(counts)
    header_bytes, payload = assemble(whole, [part_of(counts, part, parts) for part in range(parts)])
    assert (header_bytes, payload.tobytes()) == tuple(
        bytes(one) for one in assemble(whole, [part_of(counts, 0, 1)])
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


Pieces = list[tuple[PartOfLayer, Bytes]]


def without_one(pieces: Pieces) -> Pieces:
    return pieces[:1]


def twice(pieces: Pieces) -> Pieces:
    return [*pieces, pieces[0]]


def another_step(pieces: Pieces) -> Pieces:
    """The parameter that both have a piece of is at another step in the second."""
    (first, data), (second, other) = pieces
    changed = other.copy()
    run = next(run for run in second.runs if run.key == "step")
    changed[run.offset : run.offset + 4] = np.frombuffer(np.float32(6.0).tobytes(), dtype=np.uint8)
    return [(first, data), (second, changed)]


def another_layer(pieces: Pieces) -> Pieces:
    return [(msgspec.structs.replace(pieces[0][0], layer=8), pieces[0][1]), pieces[1]]


def shorter(pieces: Pieces) -> Pieces:
    return [(pieces[0][0], pieces[0][1][:-1]), pieces[1]]


@pytest.mark.parametrize("damage", [without_one, twice, another_step, another_layer, shorter])
def test_parts_that_do_not_make_up_the_layer_are_refused(damage: Callable[[Pieces], Pieces]) -> None:
    pieces = [part_of([10], part, 2) for part in range(2)]
    with pytest.raises(DamagedError, match="layer"):
        assemble(layer_of([10]), damage(pieces))


def image() -> ShardedImage:
    told, data = part_of([10], 0, 2)
    held = PartImage(part=0, size_bytes=len(data), layers=(told,))
    return ShardedImage(parts=2, layers=(layer_of([10]),), held=(held,))


def test_the_small_part_comes_back_as_it_was() -> None:
    assert ShardedImage.from_bytes(image().to_bytes()) == image()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"parts": 0},
        {"held": (msgspec.structs.replace(image().held[0], part=2),)},
        {"held": (msgspec.structs.replace(image().held[0], size_bytes=1),)},
        {"held": (msgspec.structs.replace(image().held[0], layers=()),)},
    ],
)
def test_a_small_part_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedError):
        ShardedImage.from_bytes(msgspec.structs.replace(image(), **changes).to_bytes())
    with pytest.raises(DamagedError, match="malformed"):
        ShardedImage.from_bytes(image().to_bytes()[:-3])
