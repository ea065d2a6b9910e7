"""How the layers of a group lie in a snapshot: the bucket that its owners share out, and the small part.

A *group* is a maximal run of layers with the same owners. Its *bucket* are the bytes that are the same with
all of them: parameters and the optimizer's tensors, layer by layer, each layer's in the order of its header
(``storage.layerstate``), padded as there; owners keep shards of it (``storage.shards``). Buffers differ
between replicas (running statistics), and headers say what the bytes are: they are the *small part*, a
``GroupImage``, which every owner keeps as a whole, its own. Both together make each layer's payload again.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptDataError
from storage.layerstate import LayerHeader, decode_header, decode_versioned, padded_size

FORMAT = 1
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRange:
    """``size_bytes`` bytes of a layer's payload from ``payload``, padding included.

    ``shared``: they are in the bucket, ``offset`` bytes behind the layer's beginning there; else in the
    layer's buffers from ``offset``.
    """

    payload: int
    size_bytes: int
    shared: bool
    offset: int


def runs_of(header: LayerHeader) -> tuple[PayloadRange, ...]:
    """The payload in order, as few runs as possible: a single one where the layer has no buffers.

    :raises CorruptDataError: entries that are not back to back, as ``runtime.layers.state`` packs them.
    """
    runs: list[PayloadRange] = []
    ends = {True: 0, False: 0}
    end = 0
    for entry in header.entries:
        size = padded_size(entry.size_bytes)
        shared = entry.role != "buffer"
        if entry.offset != end:
            raise CorruptDataError(
                f"layer {header.layer}: {entry.name} {entry.key} begins at {entry.offset}, not at {end}"
            )
        if runs and runs[-1].shared == shared:
            last = runs.pop()
            runs.append(
                PayloadRange(
                    payload=last.payload,
                    size_bytes=last.size_bytes + size,
                    shared=shared,
                    offset=last.offset,
                )
            )
        else:
            runs.append(PayloadRange(payload=end, size_bytes=size, shared=shared, offset=ends[shared]))
        ends[shared] += size
        end += size
    if end != header.size_bytes:
        raise CorruptDataError(f"layer {header.layer}: {end} bytes of tensors in {header.size_bytes} bytes")
    return tuple(runs)


class LayerImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a layer but its bytes in the bucket."""

    layer: int
    offset: int
    """Where the layer's bytes begin in the group's bucket."""
    size_bytes: int
    """Of the bucket, from there on."""
    header: bytes
    buffers: bytes
    """The persistent buffers, one after the other, padded."""

    def decoded(self) -> LayerHeader:
        """:raises CorruptDataError: header, buffers and the bytes in the bucket do not fit each other."""
        return decode_header(self.header, self.layer, self.size_bytes + len(self.buffers))


class GroupImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The small part of a group, in ascending order of the layers."""

    format: int = FORMAT
    bucket_bytes: int
    layers: tuple[LayerImage, ...]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "GroupImage":
        """:raises CorruptDataError: it is none, or contradicts itself."""
        image = decode_versioned(data, cls, "the small part of a group", FORMAT)
        end = 0
        for layer in image.layers:
            if layer.offset != end or layer.size_bytes < 0:
                raise CorruptDataError(
                    f"layer {layer.layer} begins at {layer.offset} of its bucket, not at {end}"
                )
            end += layer.size_bytes
            shared = sum(run.size_bytes for run in runs_of(layer.decoded()) if run.shared)
            if shared != layer.size_bytes:
                raise CorruptDataError(
                    f"layer {layer.layer} has {shared} bytes in common with its replicas, and "
                    f"{layer.size_bytes} in the bucket"
                )
        if end != image.bucket_bytes:
            raise CorruptDataError(f"layers of {end} bytes in a bucket of {image.bucket_bytes}")
        return image

    def layer(self, number: int) -> LayerImage:
        """:raises KeyError: it is in another group."""
        for layer in self.layers:
            if layer.layer == number:
                return layer
        raise KeyError(number)


def assemble_payload(layer: LayerImage, shared: Bytes) -> Bytes:
    """The payload of a layer (``runtime.layers.state``).

    :param shared: the bucket's ``layer.size_bytes`` bytes from ``layer.offset``. Where the layer has no
        buffers they are the payload itself, and come back uncopied.
    :raises CorruptDataError: they do not fit the header.
    """
    header = layer.decoded()
    if len(shared) != layer.size_bytes:
        raise CorruptDataError(f"{len(shared)} bytes for layer {layer.layer}, which has {layer.size_bytes}")
    if not layer.buffers:
        return shared
    buffers = np.frombuffer(layer.buffers, dtype=np.uint8)
    payload = np.empty(header.size_bytes, dtype=np.uint8)
    for run in runs_of(header):
        source = shared if run.shared else buffers
        payload[run.payload : run.payload + run.size_bytes] = source[run.offset : run.offset + run.size_bytes]
    return payload
