"""A training function for tests: a module of equal blocks, which no trainer creates as a whole."""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftd import Training

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.helpers.tiny import Points


class Wide(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(OrderedDict(linear=nn.Linear(width, width, bias=False), act=nn.Tanh()))
            for _ in range(blocks)
        )

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def build(*, blocks: int, width: int) -> Training:
    return Training(
        model=lambda: Wide(blocks, width),
        loss=lambda output, batch: functional.mse_loss(output, batch[1]),
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-3),
        dataset=Points(200, width, "", ""),
    )
