"""A small network that learns to tell which arm of a spiral a point lies on."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from ftd import Training


class Spirals(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points (x, y) along ``arms`` spirals, with noise; the target is the arm."""

    def __init__(self, samples: int, arms: int, noise: float) -> None:
        arm = torch.arange(samples) % arms
        radius = torch.rand(samples, dtype=torch.float64)
        angle = 4.0 * radius + 2.0 * math.pi * arm / arms + noise * torch.randn(samples, dtype=torch.float64)
        self.points = torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1)
        self.arm = arm

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.arm[index]


def hidden(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(dropout))


def build(
    *,
    hidden_layers: int = 4,
    width: int = 32,
    arms: int = 3,
    samples: int = 3000,
    noise: float = 0.15,
    dropout: float = 0.0,
    learning_rate: float = 1e-2,
    decay_steps: int = 200,
) -> Training:
    return Training(
        layers=[
            hidden(2, width, dropout),
            *(hidden(width, width, dropout) for _ in range(hidden_layers - 1)),
            nn.Linear(width, arms),
        ],
        loss=functional.cross_entropy,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=learning_rate),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=decay_steps),
        dataset=Spirals(samples, arms, noise),
    )
