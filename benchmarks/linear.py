"""A training script of equal linear layers, whose state size and computing time are easy to calculate."""

from pathlib import Path
from typing import Any

from statemachine.messages.trainer import TrainingData

_SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from runtime.training import Training

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 1024
    def __getitem__(self, index): return torch.full((1024,), index / 1024), torch.zeros(1024)

def build(layers: int):
    return Training(
        layers=[nn.Linear(1024, 1024) for _ in range(layers)], loss=functional.mse_loss, dataset=Rows(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
        tensor_plan={"*": "colwise_gather_output"},
    )
"""


def write_script(directory: Path) -> None:
    """Write the script to the path that ``training_data`` refers to."""
    (directory / "linear.py").write_text(_SCRIPT)


def training_data(directory: Path, layers: int, **more: Any) -> TrainingData:
    """Return a trainer's data for the script.

    :param more: further fields, among them ``global_batch`` and ``microbatch_rows``.
    """
    return TrainingData(
        function="linear.py:build",
        path=str(directory),
        seed=1,
        steps=1_000_000,
        arguments={"layers": layers},
        **more,
    )
