"""A Hugging Face Trainer that resumes where it was killed, by one line (``pip install '.[hf]'``).

    python examples/scripts/hf_trainer.py          # kill -9 it, and start it again

docs/tutorials/scripts.md says what is restored.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ftd import protect


class Printer(TrainerCallback):
    """A callback that prints each loss."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **its: Any) -> None:
        if "loss" in logs:
            print(f"{state.global_step} {logs['loss']:.9f}", flush=True)
            time.sleep(self.pause_s)


class Sines(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        points = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"points": points, "labels": points.sin().sum()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1))

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(points)[:, 0], labels)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--name", default="hf-trainer")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--pause-s", type=float, default=0.05, help="in each step, to have time to kill it")
    given = options.parse_args()
    torch.manual_seed(7)
    arguments = TrainingArguments(
        output_dir="hf-trainer", max_steps=given.steps, per_device_train_batch_size=32, save_strategy="no",
        logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(
        model=Model(), args=arguments, train_dataset=Sines(), callbacks=[Printer(given.pause_s)]
    )
    protect(trainer, given.name)
    trainer.train()


if __name__ == "__main__":
    main()
