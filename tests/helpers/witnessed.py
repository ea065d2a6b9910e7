"""A training function whose progress can be seen from outside without asking ftd, and slowed down.

``witness`` names a file that grows by one byte for each microbatch whose loss is computed: it tells what
the trainers do while no message gets through. ``brake`` names a file: while it exists a microbatch takes
``brake_s`` longer, so that a test has time for its faults, and the rest of the job none. Each layer takes an equal
part of it: if one stage alone became quicker when the brake is released, the others would be found to be slow.
"""

import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ftd import Training


class Braked(nn.Module):
    """Passes its input on, ``seconds`` later while the file ``brake`` exists."""

    def __init__(self, brake: Path, seconds: float) -> None:
        super().__init__()
        self._brake, self._seconds = brake, seconds

    def forward(self, x: Tensor) -> Tensor:
        if self._brake.exists():
            time.sleep(self._seconds)
        return x


def build(
    *, witness: str = "", brake: str = "", brake_s: float = 0.0, layers: int = 6, width: int = 48
) -> Training:
    inputs = torch.randn(400, width, dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if witness:
            with Path(witness).open("ab", buffering=0) as file:
                file.write(b".")
        return functional.mse_loss(output, target)

    def layer() -> nn.Sequential:
        parts = [nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)]
        if brake:
            parts.append(Braked(Path(brake), brake_s / layers))
        return nn.Sequential(*parts)

    return Training(
        layers=[layer() for _ in range(layers)],
        loss=loss,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=3e-3),
        scheduler=None,
        dataset=TensorDataset(inputs, inputs.cos().roll(1, dims=1)),
    )
