"""The bytes of a group of layers in a snapshot: the bucket that its owners divide into shards, and the small
part.

A *group* is a maximal run of layers with the same owners. Its *bucket* consists of the bytes that all
owners have in common: parameters and the optimizer's tensors, layer by layer, each layer in the order and
with the padding of its header (``storage.layerstate``). Owners hold shards of it (``storage.shards``).
Buffers may differ between replicas (running statistics), and headers describe the bytes. Both are in the
*small part*, a ``GroupImage``, which every owner holds for itself as a whole. Bucket and small part
together make each layer's payload.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptDataError
from storage.layerstate import LayerHeader, decode_header, decode_versioned, padded_size

FORMAT = 1
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRange:
    """``size_bytes`` bytes of a layer's payload from ``payload`` on, including padding.

    If ``shared``, they are in the bucket, ``offset`` bytes after the layer's beginning there; otherwise
    they are in the layer's buffers from ``offset`` on.
    """

    payload: int
    size_bytes: int
    shared: bool
    offset: int


def payload_ranges(header: LayerHeader) -> tuple[PayloadRange, ...]:
    """Return the ranges of the payload in order, as few as possible: a single one if the layer has no buffers.

    :raises CorruptDataError: entries are not back to back, as ``runtime.layers.state`` packs them.
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
            runs[-1] = replace(runs[-1], size_bytes=runs[-1].size_bytes + size)
        else:
            runs.append(PayloadRange(payload=end, size_bytes=size, shared=shared, offset=ends[shared]))
        ends[shared] += size
        end += size
    if end != header.size_bytes:
        raise CorruptDataError(f"layer {header.layer}: {end} bytes of tensors in {header.size_bytes} bytes")
    return tuple(runs)


class LayerImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a layer without its bytes in the bucket."""

    layer: int
    offset: int
    """Offset of the layer's bytes in the group's bucket."""
    size_bytes: int
    """Number of the layer's bytes in the bucket."""
    header: bytes
    buffers: bytes
    """The persistent buffers, one after the other, padded."""

    def decoded(self) -> LayerHeader:
        """Return the decoded header.

        :raises CorruptDataError: header, buffers and the bytes in the bucket do not fit each other.
        """
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
        """Return the decoded small part.

        :raises CorruptDataError: it is malformed or inconsistent.
        """
        image = decode_versioned(data, cls, "the small part of a group", FORMAT)
        end = 0
        for layer in image.layers:
            if layer.offset != end or layer.size_bytes < 0:
                raise CorruptDataError(
                    f"layer {layer.layer} begins at {layer.offset} of its bucket, not at {end}"
                )
            end += layer.size_bytes
            shared = sum(run.size_bytes for run in payload_ranges(layer.decoded()) if run.shared)
            if shared != layer.size_bytes:
                raise CorruptDataError(
                    f"layer {layer.layer} has {shared} bytes in common with its replicas, and "
                    f"{layer.size_bytes} in the bucket"
                )
        if end != image.bucket_bytes:
            raise CorruptDataError(f"layers of {end} bytes in a bucket of {image.bucket_bytes}")
        return image

    def layer(self, number: int) -> LayerImage:
        """Return the image of a layer.

        :raises KeyError: the layer is in another group.
        """
        for layer in self.layers:
            if layer.layer == number:
                return layer
        raise KeyError(number)


def assemble_payload(layer: LayerImage, shared: Bytes) -> Bytes:
    """Return the payload of a layer (``runtime.layers.state``).

    :param shared: the bucket's ``layer.size_bytes`` bytes from ``layer.offset`` on. If the layer has no
        buffers, they are the payload and are returned without a copy.
    :raises CorruptDataError: they do not fit the header.
    """
    header = layer.decoded()
    if len(shared) != layer.size_bytes:
        raise CorruptDataError(f"{len(shared)} bytes for layer {layer.layer}, which has {layer.size_bytes}")
    if not layer.buffers:
        return shared
    buffers = np.frombuffer(layer.buffers, dtype=np.uint8)
    payload = np.empty(header.size_bytes, dtype=np.uint8)
    for run in payload_ranges(header):
        source = shared if run.shared else buffers
        payload[run.payload : run.payload + run.size_bytes] = source[run.offset : run.offset + run.size_bytes]
    return payload
