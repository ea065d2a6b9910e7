"""A model whose layers take a given time without a processor, so that nodes on one machine do not slow each other.

Each layer waits in its forward and in its backward pass, as the host of an accelerator does.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftd import Training


class Wait(torch.autograd.Function):
    """The identity, which takes ``forward_s`` in the forward and ``backward_s`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Paced(nn.Module):
    """A linear layer and a wait: (rows, width) → (rows, width)."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = Wait.apply(torch.tanh(self.linear(x)), self.forward_s, self.backward_s)
        return waited


class Noise(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random inputs and targets, (width,) each."""

    def __init__(self, width: int, samples: int) -> None:
        self.inputs, self.targets = torch.randn(samples, width), torch.randn(samples, width)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def build(
    *, layers: int = 8, width: int = 256, forward_ms: float = 10.0, backward_ms: float = 20.0
) -> Training:
    return Training(
        layers=[Paced(width, forward_ms / 1e3, backward_ms / 1e3) for _ in range(layers)],
        loss=functional.mse_loss,
        dataset=Noise(width, 4096),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )
