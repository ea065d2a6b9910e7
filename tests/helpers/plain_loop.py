"""The loop that a user would write without ftd: the plain model, whole, over the same microbatches.

It uses nothing of ``runtime`` but the order of samples.
"""

import inspect
import math
import random
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.data.sampling import Sampler
from runtime.training import Training
from statemachine.messages.trainer import TrainingData

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """One step of the plain loop."""

    loss: float
    gradient_norm: float
    metrics: dict[str, float]
    skipped: bool


def plain_loop(
    make: Callable[[], Training], data: TrainingData, steps: int, overflows: Collection[int] = ()
) -> list[PlainStep]:
    """Train the model for ``steps`` steps, one microbatch after the other.

    :param overflows: steps that update nothing.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(data.seed)
        random.seed(data.seed)
        np.random.seed(data.seed % 2**32)
        training = make()
        model = training.model if training.layers is None else nn.Sequential(*training.layers)
        if not isinstance(model, nn.Module):
            assert callable(model)
            model = model()
    dtype = torch.float64 if data.precision == "float64" else torch.float32
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(data.precision)
    model.to(dtype)
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
            batch = _cast((training.collate or _stacked)(samples), dtype)
            with torch.autocast("cpu", low) if low else nullcontext():
                output = _called(model, batch)
                value, weight = _loss(training, output, batch, rows)
            for name, (amount, count) in (training.metrics or _no_metrics)(output, batch).items():
                before = counts.get(name, (0.0, 0.0))
                counts[name] = (before[0] + float(amount), before[1] + float(count))
            if weight == 0:
                continue
            value.backward()
            total += value.item()
            weights += weight
        norm = 0.0
        if weights:
            for _, parameter in named:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= weights
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in named))
            if data.clip_gradient_norm is not None:
                nn.utils.clip_grad_norm_([parameter for _, parameter in named], data.clip_gradient_norm)
        if weights and step not in overflows:
            optimizer.step()
        done.append(
            PlainStep(
                loss=total / weights if weights else 0.0,
                gradient_norm=norm,
                metrics={name: amount / count for name, (amount, count) in counts.items() if count},
                skipped=not weights or step in overflows,
            )
        )
        if scheduler is not None:
            scheduler.step()
    return done


def _no_metrics(output: Any, batch: Any) -> dict[str, Any]:
    return {}


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, tuple):
        return model(batch[0])
    taken = inspect.signature(model.forward).parameters
    return model(**{key: value for key, value in batch.items() if key in taken or "kwargs" in taken})


def _loss(training: Training, output: Any, batch: Any, rows: int) -> tuple[Tensor, float]:
    """Return the loss as a sum and the weight of that sum."""
    if training.loss is None:
        weight = _labels(batch["labels"], next_token=training.dataset.task == "causal")
        return output.loss.double() * weight, weight
    value = training.loss(output, batch if training.layers is None else batch[1])
    if isinstance(value, tuple):
        return value[0], float(value[1])
    return value * rows, rows


def _labels(labels: Tensor, *, next_token: bool) -> int:
    if labels.dim() < 2:
        return len(labels)
    return int((labels[:, 1:] if next_token else labels).ne(IGNORED).sum())


def _stacked(samples: list[Any]) -> Any:
    if isinstance(samples[0], tuple):
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _cast(entry, dtype) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_cast(entry, dtype) for entry in value)
    return value.to(dtype) if value.is_floating_point() else value
