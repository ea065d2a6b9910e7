"""Deferred modules whose tensors all get memory, for comparisons with modules that are built at once."""

from typing import Any

import torch


def whole(module: Any) -> Any:
    """Return the root of a ``DeferredModule`` with memory and initial values for all tensors."""
    context = module.materialised(module.root.modules(), torch.device("cpu"), exact=True)
    context.__enter__()
    module.root.context = context  # The tensors lose their memory with the context.
    return module.root
