"""A measurement of the memory that operations need, on any device: from the sizes of the tensors that they make."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode


def measure_peak_bytes(compute: Callable[[], Sequence[Tensor]]) -> int:
    """Return the most bytes that tensors made by ``compute``, and by the backward pass from its outputs, take at
    the same time.

    Memory that an operation allocates and frees inside of itself is not observed. Compiled modules run
    without their compiled code, whose operations cannot be observed.
    """
    with torch.compiler.set_stance("force_eager"), _PeakMemory() as memory:
        roots = [t for t in compute() if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    peak_bytes: int = memory.peak_bytes
    return peak_bytes


class _PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that adds up the storages which operations under it allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes: int = 0
        self._held_bytes = 0
        self._held: set[int] = set()
        """Addresses of the storages that were allocated under this mode and still exist."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._held:
                self._held.add(storage._cdata)
                self._held_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return result

    def _free(self, address: int, size_bytes: int) -> None:
        self._held.discard(address)
        self._held_bytes -= size_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree.tree_leaves(values) if isinstance(leaf, Tensor)]
