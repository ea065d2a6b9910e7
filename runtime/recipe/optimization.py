"""Optimizers and learning-rate schedules of a job file."""

import math
from collections.abc import Callable

from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import Optimizer

from runtime.wire.recipe import OptimizerTable, ScheduleTable

DEFAULT_WARMUP_RATIO = 0.03
_WEIGHT_DECAY = {"adamw": 0.1}
"""Weight decay if the table has none; 0 for all others."""


def make_optimizer(table: OptimizerTable) -> Callable[[list[tuple[str, nn.Parameter]]], Optimizer]:
    """Return the factory of the optimizer, which decays weights but not norms and biases."""
    decay = _WEIGHT_DECAY.get(table.name, 0.0) if table.weight_decay is None else table.weight_decay

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        weights = [p for _, p in named if p.dim() >= 2 or table.decay_all]
        others = [p for _, p in named if p.dim() < 2 and not table.decay_all]
        groups = [
            {"params": parameters, "weight_decay": rate}
            for parameters, rate in ((weights, decay), (others, 0.0))
            if parameters
        ]
        match table.name:
            case "adamw" | "adam":
                kind = AdamW if table.name == "adamw" else Adam
                return kind(
                    groups, lr=table.learning_rate, betas=table.betas, eps=table.eps, fused=table.fused
                )
            case "sgd":
                return SGD(groups, lr=table.learning_rate, momentum=table.momentum, fused=table.fused)
            case "adafactor":
                return Adafactor(groups, lr=table.learning_rate)

    return optimizer


def make_scheduler(table: ScheduleTable, steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Return the factory of the schedule over ``steps`` steps."""
    factor = schedule_factor(table, steps)
    return lambda optimizer: LambdaLR(optimizer, factor)


def schedule_factor(table: ScheduleTable, steps: int) -> Callable[[int], float]:
    """Return the function from the number of completed steps to the fraction of the highest learning rate.

    The rate rises linearly to the highest in the last step of the warm-up, and reaches the final one in the
    last step of the job.
    """
    if table.warmup_steps is not None:
        warmup = table.warmup_steps
    else:
        ratio = DEFAULT_WARMUP_RATIO if table.warmup_ratio is None else table.warmup_ratio
        warmup = round(ratio * steps)
    decay = max(1, steps - warmup)
    if table.name == "wsd":
        decay = min(decay, max(1, round(table.decay_ratio * steps)))

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        progress = min(1.0, max(0.0, 1.0 - (steps - 1 - done) / decay))
        match table.name:
            case "constant":
                return 1.0
            case "cosine":
                share = 0.5 * (1.0 + math.cos(math.pi * progress))
            case "linear" | "wsd":
                share = 1.0 - progress
        return table.final_ratio + (1.0 - table.final_ratio) * share

    return factor
