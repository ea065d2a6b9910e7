"""A byte-level GPT that learns to write Python by reading Python's standard library.

Layers: embedding, blocks, head. The head's weight *is* the embedding's: two layers, perhaps on two hosts,
share one parameter, and the script needs no code for this.
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from ftd import Training

VOCABULARY = 256  # bytes


class Embedding(nn.Module):
    """(rows, length) bytes → (rows, length, width)."""

    def __init__(self, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return x


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.forward_in = nn.Linear(width, 4 * width)
        self.forward_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        for linear in (self.attention_in, self.forward_in, self.attention_out, self.forward_out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for linear in (self.attention_out, self.forward_out):  # keeps the sum of all residuals small
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm_1(x)))
        hidden = functional.gelu(self.forward_in(self.norm_2(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.forward_out(hidden))
        return out

    def attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention_in(x).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class Head(nn.Module):
    """(rows, length, width) → (rows, length, 256) logits, by the embedding's own weight."""

    def __init__(self, embedding: Embedding, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = embedding.token.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight)


class Library(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The standard library's sources in pieces of ``length`` bytes; the target is the next byte."""

    def __init__(self, length: int, megabytes: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= megabytes * 1_000_000:
                break
        self.text = torch.frombuffer(text, dtype=torch.uint8)[: megabytes * 1_000_000]
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(
    *,
    blocks: int = 6,
    width: int = 96,
    heads: int = 4,
    length: int = 64,
    dropout: float = 0.0,
    learning_rate: float = 3e-3,
    warm_up_steps: int = 20,
    megabytes: int = 4,
) -> Training:
    embedding = Embedding(width, length, dropout)

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    return Training(
        layers=[
            embedding,
            *(Block(width, heads, dropout, blocks) for _ in range(blocks)),
            Head(embedding, width),
        ],
        loss=loss,
        optimizer=optimizer,
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up_steps)),
        dataset=Library(length, megabytes),
    )
