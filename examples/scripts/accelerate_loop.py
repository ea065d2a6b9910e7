"""A loop with accelerate that resumes where it was killed, by one line (``pip install '.[hf]'``).

    python examples/scripts/accelerate_loop.py          # kill -9 it, and start it again

docs/tutorials/scripts.md says what is restored.
"""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ftd import protect


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--name", default="accelerate")
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--pause-s", type=float, default=0.05, help="in each batch, to have time to kill it")
    given = options.parse_args()
    torch.manual_seed(7)
    points = torch.randn(160, 16)
    loader = DataLoader(TensorDataset(points, points.sin().sum(dim=1)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    loader = protect(loader, given.name, epochs=given.epochs, accelerator=accelerator)

    for _ in range(given.epochs):
        for features, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features)[:, 0], labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                print(f"{loader.step + 1} {loss.item():.9f}", flush=True)
            time.sleep(given.pause_s)


if __name__ == "__main__":
    main()
