"""Types that threads may decode at the same time."""

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_LOCK = threading.Lock()
_RESOLVED: set[type] = set()


def decodable(kind: type[T]) -> type[T]:
    """Return the type after msgspec has resolved its annotations.

    It does that when a type is decoded for the first time. If another thread decodes the type meanwhile, the process
    ends with a segmentation fault (msgspec 0.22).
    """
    with _LOCK:
        if kind not in _RESOLVED:
            msgspec.msgpack.Decoder(kind)
            _RESOLVED.add(kind)
    return kind
