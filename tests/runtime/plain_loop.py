"""The loop that a user would write without ftd: the plain model, whole, over the same microbatches.

Nothing of ``runtime`` is used here but the order of samples.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.data.sampling import Sampler
from runtime.training import Training
from runtime.wire.protocol import TrainingData

IGNORED = -100


def plain_losses(make: Callable[[], Training], data: TrainingData, steps: int) -> list[float]:
    """Return the loss of each of the first ``steps`` global batches, updated after each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(data.seed)
        random.seed(data.seed)
        np.random.seed(data.seed % 2**32)
        training = make()
    dtype = torch.float64 if data.precision == "float64" else torch.float32
    model = training.model
    assert isinstance(model, nn.Module)
    model.to(dtype).train()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = training.optimizer(named)
    scheduler = training.scheduler(optimizer) if training.scheduler else None
    sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
    rows = data.microbatch_rows
    losses = []
    for step in range(1, steps + 1):
        indices = sampler.indices(step)
        optimizer.zero_grad()
        total = weights = 0.0
        for start in range(0, data.global_batch, rows):
            samples = [training.dataset[index] for index in indices[start : start + rows]]
            batch = {
                key: _cast(value, dtype) for key, value in (training.collate or _stacked)(samples).items()
            }
            weight = _weight(model, batch, rows)
            if weight == 0:
                continue
            output = model(**batch)
            loss = output.loss if training.loss is None else training.loss(output, batch)
            (loss * weight).backward()
            total += loss.item() * weight
            weights += weight
        losses.append(total / weights if weights else 0.0)
        if weights:
            for _, parameter in named:
                if parameter.grad is not None:
                    parameter.grad /= weights
                else:
                    parameter.grad = torch.zeros_like(parameter)
            if data.clip_gradient_norm is not None:
                norm = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in named))
                if norm > data.clip_gradient_norm:
                    for _, parameter in named:
                        parameter.grad *= data.clip_gradient_norm / norm
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return losses


def _weight(model: nn.Module, batch: Mapping[str, Tensor], rows: int) -> int:
    labels = batch["labels"]
    if labels.dim() < 2:
        return rows
    shifted = "ForCausalLM" in type(model).__name__ or type(model).__name__.endswith("LMHeadModel")
    return int((labels[:, 1:] if shifted else labels).ne(IGNORED).sum())


def _stacked(samples: list[Any]) -> Any:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
