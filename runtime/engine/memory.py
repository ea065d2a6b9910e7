"""Breakdown of a stage's memory, for the error message when memory is exhausted."""

from collections.abc import Collection

import torch
from torch import Tensor

from runtime.errors import TrainingError
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization, ParameterState, state_tensors
from runtime.zero.sharded_optimizer import ShardedOptimization

_MIB = 1024 * 1024
_HOST_WORDS = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_WORDS)


def usable_memory_bytes(device: torch.device, limit_bytes: int | None = None) -> int | None:
    """Return the memory of a device that a job may use, or ``None`` if it has no limit.

    :param limit_bytes: memory that the node allows; ``None``: all of it.
    """
    if device.type != "cuda":
        return limit_bytes
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def check_planned_memory(device: int, usable_bytes: int | None, planned_bytes: int | None) -> None:
    """Check that a device has the memory that the job's plans assume.

    :param device: number of the device in its node.
    :raises TrainingError: it has less; the message contains both numbers, and what to do.
    """
    if usable_bytes is None or planned_bytes is None or usable_bytes >= planned_bytes:
        return
    usable_mib = (usable_bytes * 1000 >> 20) / 1000  # Rounded down, so that the device has it.
    raise TrainingError(
        f"device {device} of this node has {usable_bytes} bytes of memory, and the job's plans assume "
        f"{planned_bytes} bytes: give the device its memory back (node.device_memory_mib, MIG) and restart the "
        f"node, or submit the job again with planner.device_memory_mib = {usable_mib:.12g}"
    )


def explain_out_of_memory(
    error: BaseException, model: Model, optimization: Optimization, layers: Collection[int], rows: int
) -> str:
    """Return a message with the stage that ran out of memory, the bytes that it needs, and what would make it
    fit.

    :param layers: layers of the stage.
    :param rows: rows of a microbatch.
    """
    named = model.named_parameters(layers)
    held = {id(t.value): t.value for layer in layers for t in model.tensors_of(layer) if not t.value.is_meta}
    parameters = sum(value.nbytes for value in held.values())
    gradients = sum(parameter.nbytes for _, parameter in named)
    updated: list[tuple[Tensor, ParameterState]] = []
    if isinstance(optimization, ShardedOptimization):
        updated = optimization.updated()
        if optimization.shards is not None:
            parameters += sum(value.nbytes for value in optimization.shards.values.values())
            gradients = sum(value.nbytes for value in optimization.shards.gradients.values())
    updated = updated or [(parameter, optimization.parameter_state(name)) for name, parameter in named]
    trained = sum(value.nbytes for value, _ in updated)
    states = sum(tensor.nbytes for _, state in updated for tensor in state_tensors(state))
    first, last = min(layers, default=0), max(layers, default=0)
    return (
        f"out of memory in the stage of layers {first} to {last} ({model.layer_name(first)} to "
        f"{model.layer_name(last)}) on {model.device}: parameters {parameters / _MIB:.0f} MiB, gradients "
        f"{gradients / _MIB:.0f} MiB, optimizer state {states / _MIB:.0f} MiB"
        + ("" if states else f" so far (Adam keeps {2 * trained / _MIB:.0f} MiB)")
        + f", the rest are activations of microbatches of {rows} rows. To make it fit: a smaller "
        "training.microbatch, training.activation_checkpointing, training.precision, "
        "training.zero1, or more nodes with a smaller planner.device_memory_mib, so that a stage holds fewer "
        f"layers. The allocation that failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    )
