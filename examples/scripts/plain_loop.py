"""A plain training loop that resumes where it was killed; three of its lines use ftd.

python examples/scripts/plain_loop.py          # kill -9 it, and start it again
"""

import argparse
import time

import torch
from torch import nn

from ftd import Snapshotter


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--name", default="plain-loop")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--pause-s", type=float, default=0.05, help="in each step, to have time to kill it")
    options.add_argument("--keep", action="store_true", help="leave the last snapshot in memory at the end")
    given = options.parse_args()

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.steps)
    progress = {"samples": 0}

    snapshots = Snapshotter(
        given.name, model=model, optimizer=optimizer, scheduler=scheduler, progress=progress
    )
    start = snapshots.restore() or 0

    if start:
        print(f"# resumes after step {start}, {progress['samples']} samples seen", flush=True)
    for step in range(start + 1, given.steps + 1):
        points = torch.randn(64, 32)  # random states are restored, too: the same points as without a kill
        loss = nn.functional.mse_loss(model(points), points.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress["samples"] += len(points)
        snapshots.snapshot(step)
        print(f"{step} {loss.item():.9f}", flush=True)
        time.sleep(given.pause_s)

    snapshots.close() if given.keep else snapshots.remove()


if __name__ == "__main__":
    main()
