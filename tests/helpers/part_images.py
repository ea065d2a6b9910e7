"""Parts of a layer's state, as devices hold them."""

from typing import Any

import numpy as np

from storage.partimage import (
    Bytes,
    LayerPart,
    TensorInfo,
    TensorRange,
    WholeLayer,
    padded_size,
)

SCHEDULE: dict[str, Any] = {"groups": [{"lr": 0.1}]}


def layer_of(counts: list[int]) -> WholeLayer:
    """Return parameters ``w0``, ``w1``, … of these sizes, and a buffer of three elements in the middle."""
    tensors = [
        TensorInfo(name=f"w{n}", role="parameter", dtype="float32", shape=(count,), on_host=True)
        for n, count in enumerate(counts)
    ]
    buffer = TensorInfo(name="mean", role="buffer", dtype="float32", shape=(3,), on_host=True)
    tensors.insert(1, buffer)
    data = np.arange(3, dtype=np.float32).tobytes()
    return WholeLayer(
        layer=7, tensors=tuple(tensors), schedule=SCHEDULE, buffers=data.ljust(padded_size(len(data)), b"\0")
    )


def part_of(counts: list[int], start: int, end: int, of: int) -> tuple[LayerPart, Bytes]:
    """Return the values, a moment of each (plus 1000), and a step for each parameter in the part."""
    ranges: list[TensorRange] = []
    chunks: list[bytes] = []
    scalars: dict[str, dict[str, Any]] = {}
    total, begin = sum(counts), 0
    low, high = total * start // of, total * end // of

    def add(name: str, key: str, values: np.ndarray, start: int, count: int | None) -> None:
        data = values.astype(np.float32).tobytes()
        ranges.append(
            TensorRange(
                name=name,
                role="optimizer" if key else "parameter",
                key=key,
                dtype="float32",
                on_host=True,
                start=start,
                count=count,
                offset=sum(map(len, chunks)),
                size_bytes=len(data),
            )
        )
        chunks.append(data.ljust(padded_size(len(data)), b"\0"))

    for number, count in enumerate(counts):
        first, last = max(low, begin) - begin, min(high, begin + count) - begin
        if first < last:
            name, values = f"w{number}", np.arange(begin + first, begin + last)
            add(name, "", values, first, last - first)
            add(name, "exp_avg", values + 1000, first, last - first)
            add(name, "step", np.array([5.0]), 0, None)
            scalars[name] = {"seen": 5}
        begin += count
    data = np.frombuffer(b"".join(chunks), dtype=np.uint8)
    part = LayerPart(layer=7, offset=0, size_bytes=len(data), ranges=tuple(ranges), scalars=scalars)
    return part, data
