"""A plain training loop over a job file's model: one process, or several with torch DDP on gloo.

It is the reference for the engine's overhead (``benchmarks.overhead``): the same model, data, microbatches
and optimizer, without fault tolerance. It prints ``STEP <step> <monotonic seconds> <loss>`` for every step.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from runtime.data.batches import default_collate
from runtime.data.sampling import Sampler
from runtime.training import load_training
from statemachine.messages.trainer import TrainingData


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", type=Path, required=True, help="TrainingData as JSON")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="of rank 0's store; unused with one rank")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = msgspec.json.decode(arguments.training.read_bytes(), type=TrainingData)
    training = load_training(data)
    model: torch.nn.Module = torch.nn.Sequential(*training.layers)
    optimizer = training.optimizer(list(model.named_parameters()))
    if arguments.ranks > 1:
        address = f"tcp://127.0.0.1:{arguments.port}"
        dist.init_process_group("gloo", init_method=address, rank=arguments.rank, world_size=arguments.ranks)
        model = DistributedDataParallel(model)
    sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
    share = data.global_batch // arguments.ranks
    first = arguments.rank * share
    for step in range(1, arguments.steps + 1):
        rows = sampler.indices(step)[first : first + share]
        total = 0.0
        optimizer.zero_grad()
        for start in range(0, share, data.microbatch_rows):
            samples = [training.dataset[row] for row in rows[start : start + data.microbatch_rows]]
            inputs, targets = default_collate(samples)
            last = start + data.microbatch_rows >= share
            quiet = contextlib.nullcontext() if last or arguments.ranks == 1 else model.no_sync()  # type: ignore[operator]
            with quiet:
                loss = training.loss(model(inputs), targets) * (len(inputs) / share)
                loss.backward()
            total += float(loss.detach())
        if data.clip_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), data.clip_gradient_norm)
        optimizer.step()
        sys.stdout.write(f"STEP {step} {time.monotonic():.6f} {total:.9f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
