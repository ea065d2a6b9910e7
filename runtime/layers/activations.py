"""Activations, which pass between layers: a tensor or a tuple of tensors, with the samples in dim 0.

Pipeline stages send activations tensor by tensor. ``ActivationShape`` tells a receiver which buffers to
allocate and how to assemble them into an activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Activation = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    row_shape: tuple[int, ...]
    """Shape without dim 0, which counts the rows."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """Shapes and dtypes of one layer's output."""

    tensors: tuple[TensorShape, ...]
    is_tuple: bool

    def allocate(self, rows: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return uninitialised buffers for ``rows`` rows."""
        return tuple(torch.empty((rows, *t.row_shape), dtype=t.dtype, device=device) for t in self.tensors)

    def assemble(self, tensors: Sequence[Tensor]) -> Activation:
        """Return the tensors as the next layer takes them; the inverse of ``flatten``."""
        return tuple(tensors) if self.is_tuple else tensors[0]


def flatten(activation: Activation) -> tuple[Tensor, ...]:
    return activation if isinstance(activation, tuple) else (activation,)


def shape_of(activation: Activation) -> ActivationShape:
    return ActivationShape(
        tensors=tuple(TensorShape(row_shape=tuple(t.shape[1:]), dtype=t.dtype) for t in flatten(activation)),
        is_tuple=isinstance(activation, tuple),
    )


def as_received(activation: Activation | None) -> Activation | None:
    """Return a layer's input as a stage receives it from the previous stage: leaves that gradients flow to."""
    if activation is None:
        return None
    tensors = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in flatten(activation))
    return tensors if isinstance(activation, tuple) else tensors[0]
