"""Deferred modules whose tensors all get memory, for comparisons with modules that are built at once."""

from typing import Any

import torch


def whole(module: Any) -> Any:
    """Return the root of a ``DeferredModule`` with memory and initial values for all tensors."""
    module._swap(module.root.modules(), torch.device("cpu"), module._make)
    return module.root
