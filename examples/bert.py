"""Masked language modelling: BERT learns to predict hidden bytes of the Python standard library's sources."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from ftd import Training

MASK = 256  # The token ids 0 to 255 are bytes.


class Sources(torch.utils.data.Dataset[Tensor]):
    """Sequences of ``length`` bytes of the standard library's sources, from the bytes ``start`` to ``end``."""

    def __init__(self, length: int, start: int, end: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(path.read_bytes() for path in files)[start:end])
        self.pieces = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // length * length].view(
            -1, length
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index].long()


def mask(samples: list[Tensor]) -> dict[str, Tensor]:
    """Choose 15% of the bytes: 80% of these are hidden, 10% replaced by any byte, and 10% stay.

    The generator is seeded by (seed, step, microbatch), so all stages of a pipeline see the same masks.
    """
    original = torch.stack(samples)
    chosen = torch.rand(original.shape) < 0.15
    fate = torch.rand(original.shape)
    shown = original.masked_fill(chosen & (fate < 0.8), MASK)
    shown = torch.where(chosen & (fate >= 0.9), torch.randint(256, original.shape), shown)
    return {"input_ids": shown, "labels": original.masked_fill(~chosen, -100)}


def build(
    *, layers: int = 4, width: int = 64, length: int = 64, learning_rate: float = 2e-3, warmup_steps: int = 20
) -> Training:
    config = BertConfig(
        vocab_size=257,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    return Training(
        model=lambda: BertForMaskedLM(config),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=learning_rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(
            optimizer, 1 / warmup_steps, 1.0, warmup_steps
        ),
        dataset=Sources(length, 0, 4_000_000),
        evaluation=Sources(length, 4_000_000, 4_200_000),
        collate=mask,
    )
