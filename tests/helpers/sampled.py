"""A training function whose data set logs which samples are read, and whose metrics tell which were trained
on.

The samples that ``corrupt`` names have inputs a thousand times as large, so the loss of their batch is a spike.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ftd import Training


class Numbered:
    """Samples that contain their numbers; each read appends a line to a file."""

    def __init__(self, samples: int, log: str, corrupt: Sequence[int]) -> None:
        self.inputs = torch.randn(samples, 4, dtype=torch.float64)
        self.inputs[list(corrupt)] *= 1000
        self.log = Path(log)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with self.log.open("a") as file:
            file.write(f"{index}\n")  # A line is one write, so it is whole even if others append.
        return self.inputs[index], torch.tensor([float(index)], dtype=torch.float64)


class Slow(nn.Module):
    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.delay_s)
        return value


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean() + 0 * target.mean()


def numbers(output: Tensor, batch: Any) -> dict[str, Any]:
    """Return the means of the samples' numbers and of their squares."""
    number = batch[1]
    return {"number": (number.sum(), len(number)), "square": (number.square().sum(), len(number))}


def build(*, samples: int, log: str, delay_s: float = 0.0, corrupt: Sequence[int] = ()) -> Training:
    return Training(
        layers=[nn.Linear(4, 8), Slow(delay_s), nn.Linear(8, 8), Slow(delay_s), nn.Linear(8, 1)],
        loss=loss,
        metrics=numbers,
        dataset=Numbered(samples, log, corrupt),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
    )
