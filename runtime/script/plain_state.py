"""Conversion of plain data with tensors in it to msgpack and back. This is how a script's state is stored,
without pickle.

``freeze`` copies a nested value (dict, list, tuple, numbers, text, bytes, numpy arrays) into something that
msgpack can write, and hands every tensor to its caller, who gives it a number. ``thaw`` reads it back, with
a ``TensorRef`` in place of each tensor; ``rebuild`` puts the tensors in.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

TakeTensor = Callable[[Tensor, str], int]
PlaceTensor = Callable[[int, Tensor | None], Tensor]

_REF, _TUPLE, _BIG, _ARRAY, _PAIRS, _COUNTER, _NUMBER = range(1, 8)
_NUMERIC = "biufc"
"""Kinds of numpy's types of numbers."""
_AS_IT_IS = {bool, str, bytes, float}
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


class SnapshotError(ValueError):
    """A value that cannot be saved, or a call that would lose a snapshot; the message says what would work."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Placeholder of tensor number ``index``."""

    index: int


def freeze(value: Any, where: str, take: TakeTensor) -> Any:
    """Return a copy of ``value`` for ``encode``, which shares nothing mutable with it.

    :param where: name of the value, for errors.
    :param take: receives each tensor and its name, and returns the tensor's number.
    :raises SnapshotError: it contains something that is not plain data.
    """
    if value is None or type(value) in _AS_IT_IS:
        return value
    if isinstance(value, Tensor):
        return msgspec.msgpack.Ext(_REF, take(value, where).to_bytes(4, "big"))
    if isinstance(value, np.generic) and value.dtype.kind in _NUMERIC:
        return msgspec.msgpack.Ext(_NUMBER, encode([value.dtype.str, value.tobytes()]))
    if isinstance(value, int):
        number = int(value)
        if _SMALLEST <= number <= _LARGEST:
            return number
        return msgspec.msgpack.Ext(_BIG, str(number).encode())
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str | bytes):  # A subclass, such as torch.__version__, which msgpack does not take.
        return str.__str__(value) if isinstance(value, str) else bytes(value)
    if isinstance(value, dict):
        return _freeze_dict(value, where, take)
    if isinstance(value, list | tuple):
        if all(type(item) is int and 0 <= item < _LARGEST for item in value):
            return list(value) if isinstance(value, list) else msgspec.msgpack.Ext(_TUPLE, encode(value))
        items = [freeze(item, f"{where}[{index}]", take) for index, item in enumerate(value)]
        return items if isinstance(value, list) else msgspec.msgpack.Ext(_TUPLE, encode(items))
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMERIC:
        return msgspec.msgpack.Ext(_ARRAY, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    raise SnapshotError(
        f"{where} is a {type(value).__qualname__}: a snapshot holds tensors, numbers, text, bytes, None, and "
        "lists, tuples and dicts of them. Register what has state_dict() and load_state_dict(), or leave it "
        "out"
    )


def _freeze_dict(value: dict[Any, Any], where: str, take: TakeTensor) -> Any:
    frozen = {key: freeze(item, f"{where}[{key!r}]", take) for key, item in value.items()}
    if isinstance(value, Counter):
        pairs = [[freeze(key, where, take), item] for key, item in frozen.items()]
        return msgspec.msgpack.Ext(_COUNTER, encode(pairs))
    if all(type(key) is str or (type(key) is int and _SMALLEST <= key <= _LARGEST) for key in frozen):
        return frozen
    pairs = [[freeze(key, f"a key of {where}", take), item] for key, item in frozen.items()]
    return msgspec.msgpack.Ext(_PAIRS, encode(pairs))


def encode(frozen: Any) -> bytes:
    """Return the result of ``freeze`` as msgpack."""
    return msgspec.msgpack.encode(frozen)


def thaw(data: bytes) -> Any:
    """Return the value that ``encode`` wrote, with a ``TensorRef`` for each tensor.

    :raises msgspec.DecodeError: the bytes are something else.
    """
    return msgspec.msgpack.decode(data, ext_hook=_thaw_special)


def _thaw_special(code: int, data: memoryview) -> Any:
    content = bytes(data)
    match code:
        case 1:
            return TensorRef(int.from_bytes(content, "big"))
        case 2:
            return tuple(thaw(content))
        case 3:
            return int(content)
        case 4:
            dtype, shape, raw = thaw(content)
            return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
        case 5:
            return dict(thaw(content))
        case 6:
            return Counter(dict(thaw(content)))
        case 7:
            dtype, raw = thaw(content)
            return np.frombuffer(raw, dtype=np.dtype(dtype))[0]
        case _:
            raise msgspec.DecodeError(f"an unknown kind {code}")


def rebuild(thawed: Any, old: Any, place: PlaceTensor) -> Any:
    """Return the value with its tensors.

    :param old: the current value: a tensor in it is filled where it fits, so that others who hold it see
        the change.
    :param place: receives a tensor's number and the current tensor, and returns the one that will be
        filled.
    """
    if isinstance(thawed, TensorRef):
        return place(thawed.index, old if isinstance(old, Tensor) else None)
    if isinstance(thawed, Counter):
        return thawed
    if isinstance(thawed, dict):
        known = old if isinstance(old, dict) else {}
        return {key: rebuild(item, known.get(key), place) for key, item in thawed.items()}
    if isinstance(thawed, list | tuple):
        row = old if isinstance(old, list | tuple) and len(old) == len(thawed) else [None] * len(thawed)
        items = [rebuild(item, there, place) for item, there in zip(thawed, row, strict=True)]
        return items if isinstance(thawed, list) else tuple(items)
    return thawed
