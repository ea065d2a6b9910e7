"""Transfer of activations and gradients between one rank and the stages before and after its own.

A stage on several devices splits each microbatch by rows. Activations and their gradients travel directly
between the devices whose rows overlap, whatever the number of devices on either side.

Shapes of activations follow from the shapes of the microbatch. If a generation meets shapes that differ
from those of the first samples, a sender announces the shapes of its activations once to each receiver,
before the activations.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor

from runtime.engine.microbatches import StageMicrobatches
from runtime.engine.schedule import ReceiveActivation, ReceiveGradient
from runtime.groups.communicator import Channel, Communicator, PendingOperation
from runtime.layers.activations import ActivationShape, TensorShape
from runtime.layers.model import Model
from runtime.layers.world import Route
from runtime.monitoring.progress import ProgressMonitor

_PREFETCH = 2
"""Number of receives posted before they are needed: gloo moves nothing until the receiver has posted."""
_ANNOUNCED = 128
"""Numbers in an announcement of shapes: for each tensor its dtype, its number of dimensions and their sizes."""
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
Receive = ReceiveActivation | ReceiveGradient


@dataclass(slots=True)
class _PendingReceive:
    """A receive that was requested."""

    operation: Receive
    tensors: tuple[Tensor, ...] | None = None
    """Buffers; ``None`` until their shapes are known."""
    pendings: list[PendingOperation] = field(default_factory=list)
    announcement: Tensor | None = None


class StageLinks:
    """One rank's links to its neighbours in one generation.

    Buffers are allocated for each microbatch and never reused.
    """

    def __init__(self, model: Model, communicator: Communicator, monitor: ProgressMonitor) -> None:
        self._model = model
        self._communicator = communicator
        self._monitor = monitor
        self._announced: set[tuple[Any, int]] = set()
        """Signatures of batches, each with a peer that this rank has sent the shapes of activations to."""
        self._learned: set[tuple[Any, int]] = set()
        """Signatures of batches, each with a peer that has sent the shapes of its activations."""
        self._pending_receives: deque[_PendingReceive] = deque()
        self._to_post: Iterator[Receive] = iter(())
        self._sent: dict[int, list[PendingOperation]] = {}

    def begin(self, receives: Iterable[Receive], microbatches: StageMicrobatches) -> None:
        """Begin a step or a held-out batch, and post the first receives.

        :param receives: all receives, in the order in which ``receive`` will be called.
        """
        self._microbatches = microbatches
        self._to_post = iter(receives)
        self._pending_receives.clear()
        self._sent.clear()
        self._prefetch()

    def send_activation(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """Send the stage's output to the next stage without waiting."""
        assignment, key = self._microbatches.assignment(microbatch), self._microbatches.signature(microbatch)
        routes = assignment.activations_to
        uninformed = [route.peer for route in routes if not self._is_known(self._announced, key, route.peer)]
        if uninformed:
            shape = self._model.output_shape(assignment.end_layer - 1, key)
            assert shape is not None
            announcement = _announce(shape).to(self._model.device)
            for peer in uninformed:
                self._announced.add((key, peer))
                self._communicator.send(announcement, peer, "activation")
        self._sent[microbatch] = self._send(outputs, routes, "activation")

    def send_gradient(self, microbatch: int, gradients: tuple[Tensor, ...]) -> None:
        """Send the gradients of the input that ``ReceiveActivation(microbatch)`` received, without waiting."""
        self._send(gradients, self._microbatches.assignment(microbatch).gradients_to, "gradient")

    def await_sent(self, microbatch: int) -> None:
        """Wait until the next stage has taken the activations of a microbatch."""
        self._wait(self._sent.pop(microbatch))

    def receive(self) -> tuple[Tensor, ...]:
        """Return the tensors of the oldest receive."""
        pending_receive = self._pending_receives[0]
        if pending_receive.tensors is None:
            self._wait(pending_receive.pendings)
            if pending_receive.announcement is not None:
                microbatch = pending_receive.operation.microbatch
                self._model.set_output_shape(
                    self._microbatches.assignment(microbatch).first_layer - 1,
                    self._microbatches.signature(microbatch),
                    _announced(self._monitor.read_values(pending_receive.announcement)),
                )
            self._post(pending_receive)
        self._pending_receives.popleft()
        assert pending_receive.tensors is not None
        self._wait(pending_receive.pendings)
        self._prefetch()
        return pending_receive.tensors

    def _send(
        self, tensors: tuple[Tensor, ...], routes: tuple[Route, ...], channel: Channel
    ) -> list[PendingOperation]:
        return [
            self._communicator.send(
                tensor.detach()[route.start : route.end].contiguous(), route.peer, channel
            )
            for route in routes
            for tensor in tensors
        ]

    def _prefetch(self) -> None:
        for _ in range(_PREFETCH - len(self._pending_receives)):
            self._post_next()

    def _post_next(self) -> None:
        """Post the next receive in the list of operations, if its shapes are known."""
        if self._pending_receives and self._pending_receives[-1].tensors is None:
            return  # A receive that follows an announcement can be posted only after it.
        operation = next(self._to_post, None)
        if operation is None:
            return
        pending_receive = _PendingReceive(operation)
        self._pending_receives.append(pending_receive)
        assignment = self._microbatches.assignment(operation.microbatch)
        key = self._microbatches.signature(operation.microbatch)
        match operation:
            case ReceiveGradient():
                if self._model.output_shape(assignment.end_layer - 1, key) is not None:
                    self._post(pending_receive)
            case ReceiveActivation():
                unannounced = [
                    r.peer
                    for r in assignment.activations_from
                    if not self._is_known(self._learned, key, r.peer)
                ]
                if not unannounced:
                    self._post(pending_receive)
                    return
                self._learned |= {(key, peer) for peer in unannounced}
                pending_receive.announcement = torch.zeros(
                    _ANNOUNCED, dtype=torch.int64, device=self._model.device
                )
                pending_receive.pendings = [
                    self._communicator.receive(pending_receive.announcement, peer, "activation")
                    for peer in unannounced
                ]
            case _:
                assert_never(operation)

    def _is_known(self, pairs: set[tuple[Any, int]], key: Any, peer: int) -> bool:
        return key == self._model.first_signature or (key, peer) in pairs

    def _post(self, pending_receive: _PendingReceive) -> None:
        """Allocate buffers and post the receives into them."""
        operation = pending_receive.operation
        assignment = self._microbatches.assignment(operation.microbatch)
        channel: Channel
        if isinstance(operation, ReceiveActivation):
            channel, routes, layer = "activation", assignment.activations_from, assignment.first_layer - 1
        else:
            channel, routes, layer = "gradient", assignment.gradients_from, assignment.end_layer - 1
        shape = self._model.output_shape(layer, self._microbatches.signature(operation.microbatch))
        assert shape is not None
        tensors = shape.allocate(assignment.rows, self._model.device)
        if isinstance(operation, ReceiveGradient):
            tensors = tuple(tensor for tensor in tensors if tensor.is_floating_point())
        pending_receive.tensors = tensors
        pending_receive.pendings = [
            self._communicator.receive(tensor[route.start : route.end], route.peer, channel)
            for route in routes
            for tensor in tensors
        ]

    def _wait(self, pendings: list[PendingOperation]) -> None:
        for pending in pendings:
            self._monitor.wait(self._communicator, pending, "bubble")


def _announce(shape: ActivationShape) -> Tensor:
    numbers = [int(shape.is_tuple), len(shape.tensors)]
    for tensor in shape.tensors:
        numbers += [_DTYPES.index(tensor.dtype), len(tensor.row_shape), *tensor.row_shape]
    if len(numbers) > _ANNOUNCED:
        raise ValueError(f"{len(shape.tensors)} tensors cross a cut: too many to announce")
    return torch.tensor(numbers + [0] * (_ANNOUNCED - len(numbers)), dtype=torch.int64)


def _announced(announcement: list[int]) -> ActivationShape:
    numbers = iter(announcement)
    is_tuple, tensors = bool(next(numbers)), next(numbers)
    shapes = []
    for _ in range(tensors):
        dtype, dimensions = _DTYPES[next(numbers)], next(numbers)
        shapes.append(TensorShape(row_shape=tuple(next(numbers) for _ in range(dimensions)), dtype=dtype))
    return ActivationShape(tensors=tuple(shapes), is_tuple=is_tuple)
