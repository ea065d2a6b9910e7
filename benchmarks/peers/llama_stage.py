"""Plain script for one stage of a pipeline: it builds only its own layers, and nothing of ftd is in it.

Each rank makes the modules of the Hugging Face llama of ``benchmarks/jobs/llama.py`` without memory, gives
memory and random values to those of its stage, and trains one step with all forward passes before all
backward passes, over gloo. It prints ``READY <monotonic seconds>`` once its imports are done, and
``STEP 1 <monotonic seconds>`` after the update.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python benchmarks/peers/llama_stage.py
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "jobs"))

from llama import Text, make_model, make_optimizer


def bounds(layers: int, rank: int, ranks: int) -> range:
    """Return the blocks of a rank: as equal shares as possible, with fewer on the first and the last rank, which
    have the embedding and the head.
    """
    cuts = [round(number * (layers + 2) / ranks) - 1 for number in range(ranks + 1)]
    return range(max(0, cuts[rank]), min(layers, cuts[rank + 1]))


class Stage(nn.Module):
    """The layers of one rank."""

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        super().__init__()
        own = bounds(model.config.num_hidden_layers, rank, ranks)
        self.embedding = model.model.embed_tokens if rank == 0 else None
        self.blocks = nn.ModuleList(model.model.layers[number] for number in own)
        last = rank == ranks - 1
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)
        self.to_empty(device="cpu")
        self.apply(model._init_weights)
        self.rotary = type(model.model.rotary_emb)(model.config)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        rotated = self.rotary(x, places)
        for block in self.blocks:
            x = block(x, position_embeddings=rotated, position_ids=places)
        return x if self.norm is None else self.head(self.norm(x))


def train_step(
    stage: Stage, optimizer: torch.optim.Optimizer, batches: list[Tensor], hidden: int, clip: float
) -> None:
    """Train one step; every rank has the tokens of all microbatches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kept: list[tuple[Tensor, Tensor]] = []
    for tokens in batches:
        x = tokens
        if rank:
            x = torch.empty(*tokens.shape, hidden)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        output = stage(x)
        if rank < ranks - 1:
            dist.send(output.detach(), rank + 1)
        else:
            flat = output[:, :-1].reshape(-1, output.shape[-1])
            output = nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1)) / len(batches)
        kept.append((x, output))
    for x, output in kept:
        if rank < ranks - 1:
            gradient = torch.empty_like(output)
            dist.recv(gradient, rank + 1)
            output.backward(gradient)
        else:
            output.backward()
        if rank and x.grad is not None:
            dist.send(x.grad, rank - 1)
    squares = torch.stack([p.grad.square().sum() for p in stage.parameters() if p.grad is not None]).sum()
    dist.all_reduce(squares)
    scale = min(1.0, clip / float(squares.sqrt()))
    for parameter in stage.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    for name, default in (("hidden", 1024), ("layers", 11), ("vocabulary", 32000), ("length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sys.stdout.write(f"READY {time.monotonic():.6f}\n")
    sys.stdout.flush()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = make_model(given.hidden, given.layers, given.vocabulary).train()
    stage = Stage(model, rank, ranks)
    optimizer = make_optimizer(list(stage.parameters()), 3e-4)
    dist.init_process_group("gloo")
    text = Text(given.length)
    rows = torch.stack([text[number]["input_ids"] for number in range(given.global_batch)])
    train_step(stage, optimizer, list(rows.split(given.microbatch)), given.hidden, given.clip)
    sys.stdout.write(f"STEP 1 {time.monotonic():.6f}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
