"""Epochs over a data loader under DistributedDataParallel: killed, restarted, and resumed by one line.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
    torchrun --nproc-per-node 2 --max-restarts 3 examples/scripts/ddp_loader.py

Without that variable, a restarted worker may connect to the address of its dead predecessor.
docs/tutorials/scripts.md says what is restored.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ftd import protect


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--name", default="ddp-loader")
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--pause-s", type=float, default=0.05, help="in each batch, to have time to kill it")
    options.add_argument("--protection", default="none", help="against the loss of hosts: aec, arc:1, …")
    given = options.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    points = torch.randn(160, 16)
    data = TensorDataset(points, points.sin().sum(dim=1))
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = protect(
        loader, given.name, epochs=given.epochs, model=model, optimizer=optimizer, protection=given.protection
    )

    rank = dist.get_rank()
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = nn.functional.mse_loss(model(features)[:, 0], labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{rank} {loader.step + 1} {loss.item():.9f}", flush=True)
            time.sleep(given.pause_s)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
