"""Image classification: a Vision Transformer learns to read digits."""

from typing import Any

import torch
from digits import SIZE, Digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from ftd import Training


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Make a batch with the argument names of the model's ``forward``."""
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def accuracy(output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    right = output.logits.argmax(dim=1) == batch["labels"]
    return {"accuracy": right.float().mean()}


def build(*, layers: int = 4, width: int = 64, learning_rate: float = 1.5e-3) -> Training:
    config = ViTConfig(
        image_size=SIZE,
        patch_size=7,
        num_channels=1,
        num_labels=10,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )
    return Training(
        model=lambda: ViTForImageClassification(config),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=learning_rate),
        dataset=Digits(10_000),
        evaluation=Digits(500),
        collate=collate,
        metrics=accuracy,
    )
