"""DistributedDataParallel under torchrun: killed, restarted by torchrun, and resumed from memory.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
    torchrun --nproc-per-node 2 --max-restarts 3 examples/scripts/ddp.py

Without that variable, a restarted worker may connect to the address of its dead predecessor.

On several hosts, each with a snapshot agent (``ftd node --snapshots-only``), ``--protection aec`` lets it
resume when one of them is lost with its memory: docs/tutorials/snapshotter.md has the commands.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftd import Snapshotter


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--name", default="ddp")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument(
        "--pause-s", type=float, default=0.05, help="in each step, which leaves time to kill it"
    )
    options.add_argument("--protection", default="none", help="against the loss of hosts: aec, arc:1, …")
    given = options.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())  # each rank draws its own samples

    snapshots = Snapshotter(given.name, protection=given.protection, model=model, optimizer=optimizer)
    start = snapshots.restore() or 0  # the newest step that every rank can restore

    rank = dist.get_rank()
    print(f"# rank {rank} is process {os.getpid()} and resumes after step {start}", flush=True)
    for step in range(start + 1, given.steps + 1):
        points = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(points), points.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{rank} {step} {loss.item():.9f}", flush=True)
        snapshots.snapshot(step)
        time.sleep(given.pause_s)

    dist.barrier()
    snapshots.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
