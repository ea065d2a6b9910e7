"""A Hugging Face llama of about 30 million parameters with random weights that learns the bytes of Python's library.

It is a training script as a user writes it: the benchmarks train it with ftd, and the plain scripts of
their comparisons (``benchmarks/peers/llama_loop.py``) import the same model, data and optimizer from here.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ftd import Training

FILES = 60
"""Number of files of the standard library, in the order of their names."""


class Text:
    """Sequences of ``length`` bytes; a token is a byte."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]
        self._bytes = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return len(self._bytes) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._bytes[index * self._length : (index + 1) * self._length].long()
        return {"input_ids": tokens, "labels": tokens}


def make_model(hidden: int, layers: int, vocabulary: int) -> nn.Module:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config)


def make_optimizer(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)


def build(
    hidden: int = 512,
    layers: int = 8,
    vocabulary: int = 8192,
    length: int = 128,
    learning_rate: float = 3e-4,
) -> Training:
    return Training(
        model=lambda: make_model(hidden, layers, vocabulary),
        dataset=Text(length),
        optimizer=lambda named: make_optimizer([p for _, p in named], learning_rate),
    )
