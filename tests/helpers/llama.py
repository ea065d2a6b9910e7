"""A training function for tests: a very small llama with tied embeddings on random tokens."""

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.training import Training


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of random token ids."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, 100, (256, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build() -> Training:
    """Return the training; every trainer creates its own model."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Training(
        model=lambda: AutoModelForCausalLM.from_config(config),
        dataset=Tokens(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )
