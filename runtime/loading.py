"""Loading of a checkpoint into a plain PyTorch training loop: model, optimizer and learning-rate schedule."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from runtime.checkpoint_reader import tensor_of
from runtime.errors import TrainingError
from runtime.layers.optimizer import from_plain
from storage.checkpoint import Checkpoint, CheckpointStore


def load_checkpoint(
    url: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    *,
    step: int | None = None,
) -> int:
    """Load a job's checkpoint into a model, an optimizer and a schedule of your own training loop.

    The model must be the job's: its ``Training.model``, or ``nn.Sequential(*layers)``. Make the optimizer
    and the schedule as in the job's training function, from all trainable parameters of ``model``. One
    layer is in memory at a time.

    Examples:
        >>> step = load_checkpoint("/checkpoints/gpt", model, optimizer, scheduler)

    Args:
        url: Path, ``file://…``, or any URL of fsspec.
        model: Model whose parameters and persistent buffers are filled in place.
        optimizer: Optimizer whose state is set; ``None`` if you do not train on.
        scheduler: Learning-rate schedule whose state is set.
        step: Step of the checkpoint; ``None`` for the newest complete one.

    Returns:
        The number of steps that the job had done.

    Raises:
        StorageError: There is no checkpoint, or it is corrupt or unreadable.
        TrainingError: The checkpoint is of another model or optimizer; the message names everything that
            does not fit.
    """
    checkpoint = CheckpointStore.at(os.fspath(url)).open(step)
    aliases = checkpoint.description().aliases
    named = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    _check(checkpoint, named, aliases)
    states: dict[str, dict[str, Any]] = {}
    for layer in range(len(checkpoint.manifest.layers)):
        _, header, payload = checkpoint.read_layer(layer)
        for name, scalars in header.scalars.items():
            states.setdefault(name, {}).update(scalars)
        for entry in header.entries:
            value = tensor_of(payload, entry)
            if entry.role == "optimizer":
                states.setdefault(entry.name, {})[entry.key] = value.clone()
                continue
            with torch.no_grad():
                for name in (entry.name, *aliases.get(entry.name, ())):
                    named[name].copy_(value)
    schedule = checkpoint.header(0).schedule
    if optimizer is not None:
        _load_optimizer(optimizer, model, states, schedule["groups"])
    if scheduler is not None:
        if schedule["scheduler"] is None:
            raise TrainingError(f"{checkpoint.location.url}: the job had no learning-rate schedule")
        scheduler.load_state_dict(from_plain(scheduler.state_dict(), schedule["scheduler"]))
    return checkpoint.manifest.step


def _check(checkpoint: Checkpoint, named: dict[str, Tensor], aliases: dict[str, tuple[str, ...]]) -> None:
    """:raises TrainingError: the model's names or shapes differ from the checkpoint's."""
    there = {
        name: entry.shape
        for header in checkpoint.headers()
        for entry in header.entries
        if entry.role != "optimizer"
        for name in (entry.name, *aliases.get(entry.name, ()))
    }
    problems = [f"{name} is missing" for name in named if name not in there]
    problems += [f"the model has no {name}" for name in there if name not in named]
    problems += [
        f"{name} is {tuple(shape)}, in the model {tuple(named[name].shape)}"
        for name, shape in there.items()
        if name in named and tuple(named[name].shape) != shape
    ]
    if problems:
        raise TrainingError(f"{checkpoint.location.url} belongs to another model: {'; '.join(problems)}")


def _load_optimizer(
    optimizer: Optimizer, model: nn.Module, states: dict[str, dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Set the state of each parameter and the options of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if len(groups) != len(optimizer.param_groups):
        raise TrainingError(
            f"the job's optimizer had {len(groups)} parameter groups, this one has {len(optimizer.param_groups)}"
        )
    state: dict[int, dict[str, Any]] = {}
    loaded: list[dict[str, Any]] = []
    count = 0
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise TrainingError(
                f"the optimizer has a parameter of shape {unknown[0]} that is not the model's"
            )
        numbers = range(count, count + len(group["params"]))
        count += len(group["params"])
        state |= {
            number: states[names[id(parameter)]]
            for number, parameter in zip(numbers, group["params"], strict=True)
            if names[id(parameter)] in states
        }
        group_options = {key: from_plain(group.get(key), value) for key, value in options.items()}
        loaded.append({**group_options, "params": list(numbers)})
    optimizer.load_state_dict({"state": state, "param_groups": loaded})
