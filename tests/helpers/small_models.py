"""Small random Hugging Face models, created from configurations; nothing is downloaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from runtime.pretrained import PretrainedWeights

VOCABULARY = 100
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (AutoModelForCausalLM, _SMALL),
    "gpt2": (AutoModelForCausalLM, {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}),
    "mixtral": (AutoModelForCausalLM, _SMALL | {"num_local_experts": 4}),
    "qwen3_moe": (AutoModelForCausalLM, _SMALL | _EXPERTS),
    "bert": (AutoModelForMaskedLM, _SMALL),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY},
    ),
    "resnet": (
        AutoModelForImageClassification,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
}
"""Class of the model and its sizes, by architecture."""


def config_of(kind: str, *, tied: bool = True, **options: Any) -> Any:
    """Return the configuration of a small model; ``options`` override sizes."""
    config = AutoConfig.for_model(kind, **(MODELS[kind][1] | options))
    config.tie_word_embeddings = tied
    return config


def model_of(kind: str, *, tied: bool = True, seed: int = 0, auto: Any = None, **options: Any) -> Any:
    """Return a model whose parameters and running statistics are all random, in evaluation mode."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = (auto or MODELS[kind][0]).from_config(config_of(kind, tied=tied, **options))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        for name, buffer in model.named_buffers():
            if "running_" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model.eval()


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    """Return a batch of two samples for the model's ``forward``."""
    generator = torch.Generator().manual_seed(3)
    if kind == "resnet":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)} if kind == "t5" else {"input_ids": ids}


def logits_of(model: nn.Module, kind: str) -> torch.Tensor:
    """Return the model's logits on ``inputs_of(kind)``."""
    with torch.no_grad():
        logits = model.eval()(**inputs_of(kind)).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def lasting(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their first names, not copied."""
    kept = model.state_dict()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in named.items() if name in kept}


def load_into(
    tensors: Mapping[str, torch.Tensor], directory: Path, model: nn.Module, *, new: Sequence[str] = ()
) -> PretrainedWeights:
    """Fill tensors, keyed by any of their names in the model, from the files in a directory."""
    weights = PretrainedWeights(directory, model, new=new)
    weights.load_into(tensors)
    return weights
