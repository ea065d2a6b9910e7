"""One torchft replica that trains a job file's model with DDP; ``benchmarks.peers.torchft`` starts it.

It runs in a separate virtual environment that contains torchft. It prints ``STEP <step> <monotonic
seconds>`` for every committed step.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from runtime.data.batches import default_collate
from runtime.data.sampling import Sampler
from runtime.training import load_training
from statemachine.messages.trainer import TrainingData


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", type=Path, required=True, help="TrainingData as JSON")
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = msgspec.json.decode(arguments.training.read_bytes(), type=TrainingData)
    training = load_training(data)
    model = torch.nn.Sequential(*training.layers)
    optimizer = training.optimizer(list(model.named_parameters()))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]

    timeout = timedelta(seconds=arguments.timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{arguments.replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        timeout=timeout,
        hostname="127.0.0.1",
    )
    train(manager, model, Optimizer(manager, optimizer), training, data, arguments)


def train(manager, model, optimizer, training, data, arguments) -> None:  # type: ignore[no-untyped-def]
    """Train until the harness ends this process. Each replica computes its share of the batch."""
    parallel = DistributedDataParallel(manager, model)
    sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
    share = data.global_batch // arguments.replicas
    while True:
        step = manager.current_step()
        rows = sampler.indices(step + 1)[arguments.replica * share : (arguments.replica + 1) * share]
        inputs, targets = default_collate([training.dataset[row] for row in rows])
        optimizer.zero_grad()
        training.loss(parallel(inputs), targets).backward()
        optimizer.step()
        if manager.current_step() > step:
            sys.stdout.write(f"STEP {manager.current_step()} {time.monotonic():.6f}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
