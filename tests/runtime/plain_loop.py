"""The loop that a user would write without ftd: the plain model, whole, over the same microbatches.

Nothing of ``runtime`` is used here but the order of samples.
"""

import math
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.data.sampling import Sampler
from runtime.training import Training
from runtime.wire.protocol import TrainingData

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """One step of the plain loop."""

    loss: float
    gradient_norm: float
    metrics: dict[str, float]
    skipped: bool


def plain_loop(make: Callable[[], Training], data: TrainingData, steps: int) -> list[PlainStep]:
    """Train the model for ``steps`` steps, one microbatch after the other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(data.seed)
        random.seed(data.seed)
        np.random.seed(data.seed % 2**32)
        training = make()
    dtype = torch.float64 if data.precision == "float64" else torch.float32
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(data.precision)
    model = training.model
    assert isinstance(model, nn.Module)
    model.to(dtype).train()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = training.optimizer(named)
    scheduler = training.scheduler(optimizer) if training.scheduler else None
    sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
    rows = data.microbatch_rows
    done = []
    for step in range(1, steps + 1):
        indices = sampler.indices(step)
        optimizer.zero_grad()
        total = weights = 0.0
        counts: dict[str, tuple[float, float]] = {}
        for start in range(0, data.global_batch, rows):
            samples = [training.dataset[index] for index in indices[start : start + rows]]
            batch = {
                key: _cast(value, dtype) for key, value in (training.collate or _stacked)(samples).items()
            }
            with torch.autocast("cpu", low) if low else nullcontext():
                output = model(**batch)
                loss = output.loss if training.loss is None else training.loss(output, batch)
            for name, (amount, count) in (training.metrics or _no_metrics)(output, batch).items():
                before = counts.get(name, (0.0, 0.0))
                counts[name] = (before[0] + float(amount), before[1] + float(count))
            weight = _weight(training, batch, rows)
            if weight == 0:
                continue
            (loss * weight).backward()
            total += loss.item() * weight
            weights += weight
        norm = 0.0
        if weights:
            for _, parameter in named:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= weights
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in named))
            if data.clip_gradient_norm is not None and norm > data.clip_gradient_norm:
                for _, parameter in named:
                    parameter.grad *= data.clip_gradient_norm / norm
            optimizer.step()
        done.append(
            PlainStep(
                loss=total / weights if weights else 0.0,
                gradient_norm=norm,
                metrics={name: amount / count for name, (amount, count) in counts.items() if count},
                skipped=not weights,
            )
        )
        if scheduler is not None:
            scheduler.step()
    return done


def _no_metrics(output: Any, batch: Any) -> dict[str, Any]:
    return {}


def _weight(training: Training, batch: Mapping[str, Tensor], rows: int) -> int:
    """Count what the loss is a mean over."""
    labels = batch["labels"]
    if labels.dim() < 2:
        return rows
    next_token = training.dataset.task == "causal"
    return int((labels[:, 1:] if next_token else labels).ne(IGNORED).sum())


def _stacked(samples: list[Any]) -> Any:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
