"""Host memory for state while its device has no room for it.

If the device is the host's CPU, this is a separate kind of memory (shared pages) that is not counted as the
device's.
"""

import mmap

import torch
from torch import Tensor


def allocate_host_memory(size_bytes: int, device: torch.device) -> Tensor:
    """Return bytes of host memory from which ``device`` copies quickly."""
    if device.type == "cuda":
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), dtype=torch.uint8)[:size_bytes]


def copy_to_host_memory(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor in host memory."""
    flat = allocate_host_memory(tensor.nbytes, tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
