"""Precision policies: the types in which a job keeps its parameters and in which it computes.

Parameters, sums of gradients and optimizer state have the *parameter* type. Forward passes run under
autocast with the *compute* type where it is a lower one, as in ``torch.amp`` (Micikevicius et al. 2018).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A choice of types."""

    parameters: torch.dtype
    compute: torch.dtype | None = None
    """Type for autocast; ``None`` to compute in the parameters' type."""
    scales_loss: bool = False
    """Whether gradients would underflow without a loss scale."""
    tensor_cores: bool = False
    """Whether float32 matrix products may round their inputs to TensorFloat-32."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of the type without its prefix: ``float32``."""
    return str(dtype).removeprefix("torch.")


def unsupported_reason(name: str, device: torch.device) -> str | None:
    """Return why a device cannot compute with a precision, and which one it can use; ``None`` if it can."""
    if name == "tf32":
        if device.type != "cuda":
            return 'precision "tf32" needs a CUDA device; use "float32"'
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f'{torch.cuda.get_device_name(device)} has no TensorFloat-32; use "float32" or "float16"'
    if name == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f'{torch.cuda.get_device_name(device)} does not compute in bfloat16; use "float16"'
    return None


PRECISIONS = {
    "float32": Precision(parameters=torch.float32),
    "tf32": Precision(parameters=torch.float32, tensor_cores=True),
    "bfloat16": Precision(parameters=torch.float32, compute=torch.bfloat16),
    "float16": Precision(parameters=torch.float32, compute=torch.float16, scales_loss=True),
    "float64": Precision(parameters=torch.float64),
}
