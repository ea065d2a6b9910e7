"""A count of the bytes that tensors take which one thread makes, whatever device a test emulates."""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode


class AllocatedBytes(TorchDispatchMode):
    """A mode that adds up the storages which this thread's operations allocate, until they are freed.

    Meta tensors have no memory and do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most bytes that existed at the same time."""
        self._bytes = 0
        self._known: set[int] = set()
        self._lock = threading.RLock()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata in given or storage._cdata in self._known:
                continue
            with self._lock:
                self._known.add(storage._cdata)
                self._bytes += storage.nbytes()
                self.peak = max(self.peak, self._bytes)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._known.discard(address)
            self._bytes -= size_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree.tree_leaves(values)
        if isinstance(leaf, Tensor) and not leaf.is_meta
    ]
