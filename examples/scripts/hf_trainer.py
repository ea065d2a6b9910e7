"""A Hugging Face Trainer that resumes where it was killed, by one callback (``pip install 'ftd[hf]'``).

    python examples/scripts/hf_trainer.py          # kill -9 it, and start it again

The callback restores the model, the optimizer and the schedule, sets the Trainer's step, and makes its data
loader skip the batches of the epoch that were already seen. In later epochs the order of samples is that of
the first one: give the Trainer a sampler of your own if that matters. The first loss that it logs after the
restart is a mean over all steps so far, as it counts from step 0: multiply it by the step, or ignore it.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ftd import Snapshotter


class SnapshotCallback(TrainerCallback):
    """A callback that saves a snapshot after each step; ``on_train_begin`` restores the newest one."""

    def __init__(self, name: str, pause_s: float) -> None:
        self.name = name
        self.pause_s = pause_s

    def on_train_begin(self, args: Any, state: Any, control: Any, **its: Any) -> None:
        self.snapshots = Snapshotter(
            self.name, model=its["model"], optimizer=its["optimizer"], scheduler=its["lr_scheduler"]
        )
        state.global_step = self.snapshots.restore() or 0
        loader = its["train_dataloader"]
        loader.skip_batches = state.global_step * args.gradient_accumulation_steps % len(loader)
        print(f"# resumes after step {state.global_step}", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
        self.snapshots.snapshot(state.global_step)
        time.sleep(self.pause_s)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
        its["train_dataloader"].skip_batches = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **its: Any) -> None:
        if "loss" in logs:
            print(f"{state.global_step} {logs['loss']:.9f}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
        self.snapshots.remove()


class Sines(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1_000_000

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
    callback = SnapshotCallback(given.name, given.pause_s)
    Trainer(model=Model(), args=arguments, train_dataset=Sines(), callbacks=[callback]).train()


if __name__ == "__main__":
    main()
