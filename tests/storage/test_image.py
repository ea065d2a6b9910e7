"""The small part of a group: payloads are split and assembled again, and invalid data is rejected."""

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptDataError
from storage.image import GroupImage, LayerImage, assemble_payload, payload_ranges
from storage.layerstate import ALIGNMENT_BYTES, HEADER_FORMAT, LayerHeader, TensorEntry

Role = Literal["parameter", "buffer", "optimizer"]


def header_of(layer: int, tensors: list[tuple[Role, int]]) -> LayerHeader:
    entries: list[TensorEntry] = []
    end = 0
    for number, (role, size) in enumerate(tensors):
        key = "exp_avg" if role == "optimizer" else ""
        entries.append(
            TensorEntry(
                name=f"t{number}",
                role=role,
                key=key,
                dtype="uint8",
                shape=(size,),
                on_host=True,
                offset=end,
                size_bytes=size,
            )
        )
        end += size + -size % ALIGNMENT_BYTES
    return LayerHeader(
        format=HEADER_FORMAT, layer=layer, entries=tuple(entries), scalars={}, schedule={}, size_bytes=end
    )


def group_of(headers: list[LayerHeader]) -> tuple[GroupImage, np.ndarray, list[np.ndarray]]:
    """Return the image, the bucket, and the payloads that they were made of."""
    random = np.random.default_rng(1)
    layers, bucket, payloads = [], b"", []
    for header in headers:
        payload = random.integers(0, 256, header.size_bytes, dtype=np.uint8)
        shared, buffers = b"", b""
        for run in payload_ranges(header):
            part = payload[run.payload : run.payload + run.size_bytes].tobytes()
            if run.shared:
                assert run.offset == len(shared)
                shared += part
            else:
                assert run.offset == len(buffers)
                buffers += part
        layers.append(
            LayerImage(
                layer=header.layer,
                offset=len(bucket),
                size_bytes=len(shared),
                header=msgspec.msgpack.encode(header),
                buffers=buffers,
            )
        )
        bucket += shared
        payloads.append(payload)
    image = GroupImage(bucket_bytes=len(bucket), layers=tuple(layers))
    return image, np.frombuffer(bucket, dtype=np.uint8), payloads


ROLES: tuple[Role, ...] = ("parameter", "buffer", "optimizer")
LAYERS = st.lists(st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 70)), max_size=6), max_size=4)


@given(LAYERS)
def test_payloads_are_assembled_from_bucket_and_small_part(layers: list[list[tuple[Role, int]]]) -> None:
    headers = [header_of(7 + number, tensors) for number, tensors in enumerate(layers)]
    image, bucket, payloads = group_of(headers)
    read = GroupImage.from_bytes(image.to_bytes())
    assert read == image
    for header, payload in zip(headers, payloads, strict=True):
        layer = read.layer(header.layer)
        assert layer.decoded() == header
        shared = bucket[layer.offset : layer.offset + layer.size_bytes]
        assert assemble_payload(layer, shared).tobytes() == payload.tobytes()


def test_a_layer_without_buffers_is_one_range_and_not_copied() -> None:
    image, bucket, _ = group_of([header_of(0, [("parameter", 5), ("optimizer", 40), ("optimizer", 4)])])
    (run,) = payload_ranges(image.layers[0].decoded())
    assert (run.payload, run.offset, run.shared, run.size_bytes) == (0, 0, True, 16 + 48 + 16)
    assert np.shares_memory(assemble_payload(image.layers[0], bucket), bucket)


HEADERS = [header_of(1, [("parameter", 20), ("buffer", 3)]), header_of(2, [("parameter", 64)])]
Change = Callable[[GroupImage], GroupImage]


def with_layer(**changes: object) -> Change:
    def change(image: GroupImage) -> GroupImage:
        first = msgspec.structs.replace(image.layers[0], **changes)
        return msgspec.structs.replace(image, layers=(first, *image.layers[1:]))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_layer(offset=16), "layer 1 begins at 16 of its bucket, not at 0"),
        (with_layer(layer=3), "a header of layer 1"),
        (with_layer(buffers=b""), "instead of layer 1 with 32 bytes"),
        (with_layer(buffers=bytes(32), size_bytes=16), "layer 1 has 32 bytes in common with its replicas"),
        (with_layer(header=b"\x01"), "header of layer 1 is malformed"),
        (lambda i: msgspec.structs.replace(i, bucket_bytes=5), "layers of 96 bytes in a bucket of 5"),
        (lambda i: msgspec.structs.replace(i, format=9), "a group is of format 9"),
    ],
)
def test_an_inconsistent_small_part_is_rejected(change: Change, says: str) -> None:
    image, _, _ = group_of(HEADERS)
    with pytest.raises(CorruptDataError, match=says):
        GroupImage.from_bytes(change(image).to_bytes())


def test_truncated_bytes_are_rejected() -> None:
    image, bucket, _ = group_of(HEADERS)
    with pytest.raises(CorruptDataError, match="malformed"):
        GroupImage.from_bytes(image.to_bytes()[:-3])
    with pytest.raises(CorruptDataError, match="3 bytes for layer 1, which has 32"):
        assemble_payload(image.layers[0], bucket[:3])


def test_gaps_between_tensors_are_rejected() -> None:
    header = header_of(0, [("parameter", 16), ("parameter", 16)])
    moved = msgspec.structs.replace(header.entries[1], offset=32)
    gap = msgspec.structs.replace(header, entries=(header.entries[0], moved), size_bytes=48)
    with pytest.raises(CorruptDataError, match="t1  begins at 32, not at 16"):
        payload_ranges(gap)
