"""train_plain.py after the port (docs/tutorials/porting.md):  ftd local examples/nanogpt/train_ftd.toml --nodes 4"""

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from model import GPT, GPTConfig

from ftd import Training

# data
block_size = 64
# model
n_layer = 4
n_head = 4
n_embd = 96
dropout = 0.0
# optimizer
learning_rate = 3e-3
weight_decay = 0.1
beta1, beta2 = 0.9, 0.95
warmup_iters = 20
lr_decay_iters = 200
min_lr = 3e-4

# the bytes of the standard library, the last tenth held out
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = np.frombuffer(b"".join(path.read_bytes() for path in sources), dtype=np.uint8)
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


class Crops(torch.utils.data.Dataset):
    """Every crop of block_size tokens; ftd chooses which of them a step takes."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) - block_size

    def __getitem__(self, i):
        x = torch.from_numpy(self.data[i : i + block_size].astype(np.int64))
        y = torch.from_numpy(self.data[i + 1 : i + 1 + block_size].astype(np.int64))
        return {"idx": x, "targets": y}  # the names that GPT.forward has


def make_optimizer(named):
    # matrices decay, biases and norms do not
    decay = [p for _, p in named if p.dim() >= 2]
    no_decay = [p for _, p in named if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def build():
    config = GPTConfig(block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=dropout)
    return Training(
        model=lambda: GPT(config),
        loss=lambda output, batch: output[1],  # forward returns (logits, loss)
        optimizer=make_optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda it: get_lr(it) / learning_rate
        ),
        dataset=Crops(train_data),
        evaluation=Crops(val_data),
    )
