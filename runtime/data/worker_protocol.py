"""Messages between a trainer and a data worker.

The trainer writes :class:`Read`; the worker answers each with :class:`Loaded`, followed by the bytes of all
tensors in the order of their nodes, or with :class:`Failed`. All of it passes through one stream socket.
"""

import socket
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from runtime.data.batches import Batch, leaves_of
from runtime.wire.frames import MAX_FRAME_BYTES, Frame, ProtocolError, encode


class Read(Frame, frozen=True, kw_only=True):
    """Read a microbatch: see ``runtime.data.reading.Key``."""

    step: int
    batch: int
    microbatch: int


class TensorNode(Frame, frozen=True, kw_only=True):
    """A tensor, whose bytes follow after the frame."""

    dtype: str
    shape: tuple[int, ...]


class SequenceNode(Frame, frozen=True, kw_only=True):
    """A list or a tuple."""

    items: "list[Node]"
    is_tuple: bool


class DictNode(Frame, frozen=True, kw_only=True):
    """A dict with string keys."""

    items: "dict[str, Node]"


class ValueNode(Frame, frozen=True, kw_only=True):
    """A leaf that is no tensor."""

    value: bool | int | float | str | None


Node = TensorNode | SequenceNode | DictNode | ValueNode


class Loaded(Frame, frozen=True, kw_only=True):
    """The microbatch that was asked for."""

    batch: Node


class Failed(Frame, frozen=True, kw_only=True):
    """The microbatch cannot be made; ``detail`` says why."""

    detail: str


_Received = TypeVar("_Received")


def send_batch(stream: socket.socket, batch: Batch) -> None:
    """Write :class:`Loaded` and the bytes of the batch's tensors."""
    stream.sendall(encode(Loaded(batch=_node_of(batch))))
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor) and leaf.numel():
            stream.sendall(_bytes_of(leaf))


def receive_batch(stream: socket.socket, node: Node, *, pinned: bool) -> Batch:
    """Read the bytes of the tensors of a batch that ``node`` describes, into pinned memory if so desired.

    :raises EOFError: the other end is closed.
    """
    match node:
        case TensorNode(dtype=dtype, shape=shape):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=pinned)
            if tensor.numel():
                _receive_into(stream, _bytes_of(tensor))
            return tensor
        case SequenceNode(items=items, is_tuple=is_tuple):
            parts = [receive_batch(stream, item, pinned=pinned) for item in items]
            return tuple(parts) if is_tuple else parts
        case DictNode(items=items):
            return {key: receive_batch(stream, item, pinned=pinned) for key, item in items.items()}
        case ValueNode(value=value):
            return value


def receive_frame(stream: socket.socket, decoder: "msgspec.msgpack.Decoder[_Received]") -> _Received:
    """Read one frame.

    :raises EOFError: the other end is closed.
    :raises ProtocolError: the frame is too long or malformed.
    """
    head = bytearray(4)
    _receive_into(stream, memoryview(head))
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    body = bytearray(length)
    _receive_into(stream, memoryview(body))
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed frame: {error}") from error


def _node_of(batch: Batch) -> Node:
    match batch:
        case Tensor():
            return TensorNode(dtype=str(batch.dtype).removeprefix("torch."), shape=tuple(batch.shape))
        case tuple() | list():
            return SequenceNode(items=[_node_of(item) for item in batch], is_tuple=isinstance(batch, tuple))
        case dict():
            return DictNode(items={key: _node_of(item) for key, item in batch.items()})
        case _:
            return ValueNode(value=batch)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _receive_into(stream: socket.socket, view: memoryview) -> None:
    while view:
        received = stream.recv_into(view, flags=socket.MSG_WAITALL)
        if not received:
            raise EOFError("the other end is closed")
        view = view[received:]
