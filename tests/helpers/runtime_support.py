"""Small training functions, written to files as a user would, and the data that refers to them."""

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.training import Training
from statemachine.messages.trainer import TrainingData

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def data_for(function: str, path: Path | str = EXAMPLES, **changes: Any) -> TrainingData:
    fields: dict[str, Any] = {
        "seed": 3,
        "steps": 10,
        "global_batch": 16,
        "microbatch_rows": 4,
        "precision": "float64",
    }
    return TrainingData(function=function, path=str(path), **(fields | changes))


def gpt_data(**changes: Any) -> TrainingData:
    """Return the data of a job with the example's GPT, tiny: 4 layers, of which the first and the last share a
    weight.
    """
    arguments = {"blocks": 2, "width": 8, "heads": 2, "length": 8, "megabytes": 1} | changes.pop(
        "arguments", {}
    )
    return data_for("gpt.py:build", arguments=arguments, **changes)


def script(directory: Path, text: str, name: str = "mine.py") -> Path:
    """Write a user's script with common imports, and return its path."""
    head = """
    import torch
    from torch import nn
    from torch.nn import functional
    from runtime.training import Training

    class Rows(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, index):
            return torch.full((3,), index / 40), torch.tensor([float(index % 2)])

    def sgd(named):
        return torch.optim.SGD([p for _, p in named], lr=0.1)
    """
    path = directory / name
    path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return path


class Regression(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """40 rows of 6 numbers; the target is a fixed non-linear function of them."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.rand(40, 6, generator=generator, dtype=dtype)
        self.y = (self.x.sin().sum(1, keepdim=True) - 3.0) ** 2

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def training_of(layers: list[nn.Module], **changes: Any) -> Training:
    """Return a training of float64 layers built by the test, with inputs (rows, 6) and targets (rows, 1)."""
    fields: dict[str, Any] = {
        "layers": tuple(layer.to(torch.float64) for layer in layers),
        "loss": functional.mse_loss,
        "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        "dataset": Regression(),
    }
    return Training(**(fields | changes))
