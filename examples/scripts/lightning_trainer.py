"""A Lightning Trainer that resumes where it was killed, by one line (``pip install '.[lightning]'``).

    python examples/scripts/lightning_trainer.py          # kill -9 it, and start it again

docs/tutorials/scripts.md says what is restored.
"""

import argparse
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ftd import protect


class Model(pl.LightningModule):
    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 1))
        self.pause_s = pause_s

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        loss = nn.functional.mse_loss(self.net(points)[:, 0], labels)
        print(f"{self.global_step + 1} {loss.item():.9f}", flush=True)
        time.sleep(self.pause_s)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--name", default="lightning")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--pause-s", type=float, default=0.05, help="in each step, to have time to kill it")
    given = options.parse_args()
    torch.manual_seed(7)
    points = torch.randn(160, 16)
    loader = DataLoader(TensorDataset(points, points.sin().sum(dim=1)), batch_size=32, shuffle=True)
    trainer = pl.Trainer(
        max_steps=given.steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    protect(trainer, given.name)
    trainer.fit(Model(given.pause_s), loader)


if __name__ == "__main__":
    main()
