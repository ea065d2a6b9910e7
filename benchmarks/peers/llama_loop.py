"""Plain script that is the reference of the benchmarks of Hugging Face models: no fault tolerance, nothing of ftd.

It trains the same model with the same data, optimizer and microbatches as ``benchmarks/jobs/llama.py``, as
one process or, under torchrun, with DDP on gloo. It prints ``STEP <step> <monotonic seconds> <loss>`` for
every step of rank 0.

    python benchmarks/peers/llama_loop.py --steps 20
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/peers/llama_loop.py --steps 20
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent / "jobs"))

from llama import Text, make_model, make_optimizer


def autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()


def compile_blocks(model: nn.Module) -> None:
    """Compile block by block, as is usual for transformers and as ftd does it."""
    for block in model.model.layers:  # type: ignore[union-attr]
        block.compile()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[dict[str, Tensor]],
    precision: str,
    clip: float | None,
) -> float:
    """Accumulate gradients over the microbatches, clip and update; return the mean loss."""
    total = 0.0
    optimizer.zero_grad()
    for number, batch in enumerate(microbatches):
        last = number == len(microbatches) - 1
        alone = last or not isinstance(model, DistributedDataParallel)
        with contextlib.nullcontext() if alone else model.no_sync():  # type: ignore[operator]
            with autocast(precision):
                loss = model(**batch).loss / len(microbatches)
            loss.backward()
        total += float(loss.detach())
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total


def batches(rows: int, rank: int, ranks: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's microbatches, epoch after epoch, as PyTorch's own loader makes them."""
    text = Text(length)
    sampler: Any = torch.utils.data.DistributedSampler(text, ranks, rank, drop_last=True)  # type: ignore[arg-type]
    loader: Any = torch.utils.data.DataLoader(text, batch_size=rows, sampler=sampler)  # type: ignore[arg-type]
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0)
    for name, default in (("hidden", 512), ("layers", 8), ("vocabulary", 8192), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = make_model(given.hidden, given.layers, given.vocabulary).train()
    model.config.use_cache = False  # type: ignore[union-attr]
    if given.compile:
        compile_blocks(model)
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(list(model.parameters()), 3e-4)
    source = batches(given.microbatch, rank, ranks, given.length)
    microbatches = given.global_batch // given.microbatch // ranks
    for step in range(1, given.steps + 1):
        loss = train_step(
            model, optimizer, [next(source) for _ in range(microbatches)], given.precision, given.clip
        )
        if rank == 0:
            sys.stdout.write(f"STEP {step} {time.monotonic():.6f} {loss:.9f}\n")
            sys.stdout.flush()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
