"""Pipeline schedules as pure data: one-forward-one-backward for training, forward only for evaluation.

``one_f_one_b`` (PipeDream-Flush, Narayanan et al. 2021) lists the operations of one stage in one step, in
order; an executor runs the list. It works for any number of microbatches, even fewer than stages. A receive
directly precedes the operation that uses its result, and a send directly follows the operation that
produces its data. Sends must not block until they are received: stage s sends an activation while stage s +
1 may be about to send it a gradient.

``forward_only`` lists the operations of one stage to evaluate microbatches. No gradients return that would
hold a stage back, so the stage waits now and then until the next stage has received what it sent
(``AwaitReceived``). Otherwise the activations of all microbatches could accumulate in the memory of the
first stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_UNRECEIVED = 2
"""Limit of the activations that a stage of ``forward_only`` has sent and the next stage has not received."""


@dataclass(frozen=True)
class _OfMicrobatch:
    """One operation of a stage on a microbatch."""

    microbatch: int


class ReceiveActivation(_OfMicrobatch):
    """Receipt of the input of ``Forward(microbatch)`` from the previous stage."""


class Forward(_OfMicrobatch):
    """The forward pass of the stage's layers."""


class SendActivation(_OfMicrobatch):
    """Sending of the output of ``Forward(microbatch)`` to the next stage."""


class ReceiveGradient(_OfMicrobatch):
    """Receipt of the gradient of ``SendActivation(microbatch)`` from the next stage."""


class Backward(_OfMicrobatch):
    """The backward pass of the stage's layers."""


class SendGradient(_OfMicrobatch):
    """Sending of the gradient of ``ReceiveActivation(microbatch)`` to the previous stage."""


class AwaitReceived(_OfMicrobatch):
    """Wait until the next stage has received the activations of ``SendActivation(microbatch)``."""


Operation = ReceiveActivation | Forward | SendActivation | ReceiveGradient | Backward | SendGradient
ForwardOperation = ReceiveActivation | Forward | SendActivation | AwaitReceived


def one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Operation, ...]:
    """Return the operations of ``stage`` (0 … stages − 1) for one step of its pipeline.

    At most ``min(stages - stage, microbatches)`` microbatches are between their forward and their
    backward pass at any time; both passes run in the order of the microbatches.
    """
    _check_stage(stage, stages)
    if microbatches < 0:
        raise ValueError(f"{microbatches} microbatches")
    first, last = stage == 0, stage == stages - 1
    warm_up = min(stages - stage - 1, microbatches)
    operations: list[Operation] = []

    def forward(microbatch: int) -> None:
        if not first:
            operations.append(ReceiveActivation(microbatch))
        operations.append(Forward(microbatch))
        if not last:
            operations.append(SendActivation(microbatch))

    def backward(microbatch: int) -> None:
        if not last:
            operations.append(ReceiveGradient(microbatch))
        operations.append(Backward(microbatch))
        if not first:
            operations.append(SendGradient(microbatch))

    for microbatch in range(warm_up):
        forward(microbatch)
    for microbatch in range(warm_up, microbatches):
        forward(microbatch)
        backward(microbatch - warm_up)
    for microbatch in range(microbatches - warm_up, microbatches):
        backward(microbatch)
    return tuple(operations)


def forward_only(stage: int, stages: int, microbatches: Sequence[int]) -> tuple[ForwardOperation, ...]:
    """Return the operations of ``stage`` (0 … stages − 1) that run these microbatches forward, in this order.

    Before a microbatch is computed, at most ``MAX_UNRECEIVED - 1`` activations are on their way to the next
    stage.
    """
    _check_stage(stage, stages)
    operations: list[ForwardOperation] = []
    for position, microbatch in enumerate(microbatches):
        if stage < stages - 1 and position >= MAX_UNRECEIVED:
            operations.append(AwaitReceived(microbatches[position - MAX_UNRECEIVED]))
        if stage > 0:
            operations.append(ReceiveActivation(microbatch))
        operations.append(Forward(microbatch))
        if stage < stages - 1:
            operations.append(SendActivation(microbatch))
    return tuple(operations)


def _check_stage(stage: int, stages: int) -> None:
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of a pipeline of {stages} stages")
