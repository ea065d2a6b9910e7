"""Runs one stage's list of 1F1B operations for one step.

A stage on several devices splits each microbatch by rows; activations and their gradients go straight
between the devices whose rows overlap, whatever the number of devices on either side.

Last stages compute each microbatch's loss as a sum and a weight. Sums are divided by a constant for the
backward pass; the sums of all gradients are divided by the total weight once, before the update, so they are
exactly those of the mean over the global batch, however it was cut.

Shapes of activations follow from the shapes of the microbatch. When a generation meets other shapes than
those of the first samples, the sending stage announces those of its activations once, ahead of them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import Batch, signature, slice_rows, to_device
from runtime.data.loader import BatchLoader
from runtime.engine.gradients import Gradients
from runtime.engine.schedule import (
    Backward,
    Forward,
    Operation,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    one_f_one_b,
)
from runtime.groups.communicator import Channel, Communicator, Pending
from runtime.layers.activations import Activation, ActivationShape, TensorShape, flatten, shape_of
from runtime.layers.model import Model
from runtime.layers.world import Route, Seat
from runtime.watch.pace import Pace
from runtime.watch.stopwatch import Stopwatch
from runtime.wire.protocol import TrainingData

_PREFETCH = 2
"""Receives posted before they are needed: gloo moves nothing before the receiver has posted."""
_ANNOUNCED = 128
"""Numbers in an announcement of shapes: for each tensor its type, its dimensions and their sizes."""
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


@dataclass(slots=True)
class StepTotals:
    """One rank's part of a step: sums over its rows of the microbatches, on last stages."""

    loss: float = 0.0
    weight: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Sum and weight by name."""


@dataclass(slots=True)
class _Arriving:
    """A receive that was asked for."""

    operation: ReceiveActivation | ReceiveGradient
    tensors: tuple[Tensor, ...] | None = None
    """Buffers; ``None`` while their shapes are not known."""
    pendings: list[Pending] = field(default_factory=list)
    announcement: Tensor | None = None


class StageExecutor:
    """One rank's stage for one generation. Buffers are allocated per microbatch, never reused."""

    def __init__(
        self,
        *,
        model: Model,
        data: TrainingData,
        loader: BatchLoader,
        seat: Seat,
        communicator: Communicator,
        gradients: Gradients,
        pace: Pace,
    ) -> None:
        self._model = model
        self._data = data
        self._loader = loader
        self._seat = seat
        self._communicator = communicator
        self._gradients = gradients
        self._pace = pace
        self._stopwatch = Stopwatch(model.device, pace)
        # With fewer rows than devices some device of a stage has none, and nothing to do but to sync.
        self._operations = one_f_one_b(seat.stage, seat.stages, seat.microbatches) if seat.rows else ()
        self._last = max((o.microbatch for o in self._operations if isinstance(o, Backward)), default=-1)
        self._reads = model.needs_batch or seat.is_first or seat.is_last
        self._announced = {model.first_signature}
        """Signatures of batches for which the next stage knows the shapes of activations."""
        self._heard = {model.first_signature}
        """Signatures for which this stage knows the shapes of what the previous one sends."""
        self._planned = False
        self._reset()

    def _reset(self) -> None:
        self._step = 0
        self._scale = 1.0
        self._batches: dict[int, Batch] = {}
        self._signatures: dict[int, Any] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._output_gradients: dict[int, tuple[Tensor, ...]] = {}
        self._arriving: deque[_Arriving] = deque()
        self._to_post: Iterator[Operation] = iter(())
        self._loss: Tensor = torch.zeros((), dtype=torch.float64, device=self._model.device)
        self._totals = StepTotals()

    def run(self, step: int, scale: float) -> StepTotals:
        """COMPUTE of step ``step``; bucket all-reduces are under way when it returns.

        :param scale: constant factor on the sums of losses whose gradients are computed.
        :raises CommunicationError: aborted, or a peer is lost.
        :raises TrainingError: the data set, the collate function or the loss is at fault.
        """
        self._reset()
        self._step, self._scale = step, scale
        if self._reads and self._operations and not self._planned:
            self._planned = True
            self._loader.plan(self._keys(step))
        self._to_post = (o for o in self._operations if isinstance(o, ReceiveActivation | ReceiveGradient))
        self._gradients.begin()
        self._stopwatch.begin()
        for _ in range(_PREFETCH):
            self._ask_for_next()
        for operation in self._operations:
            self._communicator.check()
            self._pace.tick()
            match operation:
                case ReceiveActivation(microbatch=microbatch):
                    self._inputs[microbatch] = self._receive()
                case Forward(microbatch=microbatch):
                    self._forward(microbatch)
                case SendActivation(microbatch=microbatch):
                    self._send_activation(microbatch)
                case ReceiveGradient(microbatch=microbatch):
                    self._output_gradients[microbatch] = self._receive()
                case Backward(microbatch=microbatch):
                    self._backward(microbatch)
                case SendGradient(microbatch=microbatch):
                    self._send_gradient(microbatch)
        self._totals.loss = float(self._loss)
        return self._totals

    def microbatch_ms(self) -> float:
        """Of the last step: ``Stopwatch.microbatch_ms``."""
        return self._stopwatch.microbatch_ms()

    # --- computing -----------------------------------------------------------------------------

    def _keys(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield the microbatches that this rank will read, from ``step`` on."""
        first, number = self._seat.first_microbatch, self._seat.microbatches
        for later in count(step):
            yield from ((later, first + microbatch) for microbatch in range(number))

    def _batch(self, microbatch: int) -> Batch:
        """Return this rank's rows of a microbatch, on its device."""
        if microbatch not in self._batches:
            seat, rows = self._seat, self._data.microbatch_rows
            with self._pace.read():
                whole = self._loader.load(
                    self._step, seat.first_microbatch + microbatch, self._communicator.check
                )
            own = slice_rows(whole, seat.first_row, seat.first_row + seat.rows, rows)
            self._batches[microbatch] = to_device(own, self._model.device)
        return self._batches[microbatch]

    def _signature(self, microbatch: int) -> Any:
        if not self._model.needs_batch:
            return None
        if microbatch not in self._signatures:
            self._signatures[microbatch] = signature(self._batch(microbatch))
        return self._signatures[microbatch]

    def _forward(self, microbatch: int) -> None:
        seat, model = self._seat, self._model
        row = (seat.first_microbatch + microbatch) * self._data.microbatch_rows + seat.first_row
        batch = self._batch(microbatch) if self._reads else None
        x = None if seat.is_first else self._input(microbatch)
        with self._pace.trace.span("forward", microbatch), self._stopwatch.computing(microbatch):
            output = model.forward(seat.first_layer, seat.end_layer, x, step=self._step, row=row, batch=batch)
            if seat.is_last:
                total, weight = model.loss(output, batch, seat.rows)
                self._loss += total.detach()
                self._totals.weight += float(weight)
                self._add_metrics(output, batch)
                self._outputs[microbatch] = (total * self._scale,)
            else:
                self._outputs[microbatch] = flatten(output)
                model.learn_shape(seat.end_layer - 1, self._signature(microbatch), shape_of(output))
        self._batches.pop(microbatch, None)

    def _add_metrics(self, output: Any, batch: Batch) -> None:
        metrics = self._totals.metrics
        for name, (total, weight) in self._model.metrics(output, batch, self._seat.rows).items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + total, before[1] + weight)

    def _input(self, microbatch: int) -> Activation:
        """Return what the previous stage sent, as the stage's first layer takes it."""
        tensors = self._inputs[microbatch]
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
        shape = self._model.output_shape(self._seat.first_layer - 1, self._signature(microbatch))
        assert shape is not None
        return shape.assemble(tensors)

    def _backward(self, microbatch: int) -> None:
        if microbatch == self._last:
            self._gradients.arm()
        outputs = self._outputs.pop(microbatch)
        if self._seat.is_last:
            gradients: list[Tensor | None] = [None]
        else:
            arrived = iter(self._output_gradients.pop(microbatch))
            gradients = [next(arrived) if o.is_floating_point() else None for o in outputs]
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if not pairs:
            return
        with self._pace.trace.span("backward", microbatch), self._stopwatch.computing(microbatch):
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    # --- talking to the neighbours ---------------------------------------------------------------

    def _send_activation(self, microbatch: int) -> None:
        key, outputs = self._signature(microbatch), self._outputs[microbatch]
        if key not in self._announced and self._seat.following:
            self._announced.add(key)
            shape = self._model.output_shape(self._seat.end_layer - 1, key)
            assert shape is not None
            announcement = _announce(shape).to(self._model.device)
            for route in self._seat.following:
                self._communicator.send(announcement, route.peer, "activation")
        self._send(outputs, self._seat.following, "activation")

    def _send(self, tensors: tuple[Tensor, ...], routes: tuple[Route, ...], channel: Channel) -> None:
        for route in routes:
            for tensor in tensors:
                part = tensor.detach()[route.start : route.end].contiguous()
                self._communicator.send(part, route.peer, channel)

    def _send_gradient(self, microbatch: int) -> None:
        inputs = [x for x in self._inputs.pop(microbatch) if x.is_floating_point()]
        gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        self._send(gradients, self._seat.previous, "gradient")

    def _ask_for_next(self) -> None:
        """Post the receive that stands next in the list of operations, if its shapes are known."""
        if self._arriving and self._arriving[-1].tensors is None:
            return  # What comes after an announcement can be posted only after it.
        operation = next(self._to_post, None)
        if operation is None:
            return
        assert isinstance(operation, ReceiveActivation | ReceiveGradient)
        arriving = _Arriving(operation)
        self._arriving.append(arriving)
        key = self._signature(operation.microbatch)
        known = self._heard if isinstance(operation, ReceiveActivation) else self._announced
        if key in known:
            self._post(arriving)
        elif isinstance(operation, ReceiveActivation):
            arriving.announcement = torch.zeros(_ANNOUNCED, dtype=torch.int64, device=self._model.device)
            arriving.pendings = [
                self._communicator.receive(arriving.announcement, route.peer, "activation")
                for route in self._seat.previous
            ]

    def _post(self, arriving: _Arriving) -> None:
        """Allocate buffers and receive into them."""
        seat, model, operation = self._seat, self._model, arriving.operation
        key = self._signature(operation.microbatch)
        channel: Channel
        if isinstance(operation, ReceiveActivation):
            channel, routes, layer = "activation", seat.previous, seat.first_layer - 1
        else:
            channel, routes, layer = "gradient", seat.following, seat.end_layer - 1
        shape = model.output_shape(layer, key)
        assert shape is not None
        tensors = shape.allocate(seat.rows, model.device)
        if isinstance(operation, ReceiveGradient):
            tensors = tuple(tensor for tensor in tensors if tensor.is_floating_point())
        arriving.tensors = tensors
        arriving.pendings = [
            self._communicator.receive(tensor[route.start : route.end], route.peer, channel)
            for route in routes
            for tensor in tensors
        ]

    def _receive(self) -> tuple[Tensor, ...]:
        """Return what the oldest receive brought."""
        if not self._arriving:
            self._ask_for_next()
        arriving = self._arriving[0]
        if arriving.tensors is None:
            self._wait(arriving.pendings)
            if arriving.announcement is not None:
                key = self._signature(arriving.operation.microbatch)
                self._model.learn_shape(self._seat.first_layer - 1, key, _announced(arriving.announcement))
                self._heard.add(key)
            self._post(arriving)
        self._arriving.popleft()
        assert arriving.tensors is not None
        self._wait(arriving.pendings)
        while len(self._arriving) < _PREFETCH:
            before = len(self._arriving)
            self._ask_for_next()
            if len(self._arriving) == before:
                break
        return arriving.tensors

    def _wait(self, pendings: list[Pending]) -> None:
        for pending in pendings:
            self._pace.wait(self._communicator, pending, "bubble")


def _announce(shape: ActivationShape) -> Tensor:
    numbers = [int(shape.is_tuple), len(shape.tensors)]
    for tensor in shape.tensors:
        numbers += [_DTYPES.index(tensor.dtype), len(tensor.row_shape), *tensor.row_shape]
    if len(numbers) > _ANNOUNCED:
        raise ValueError(f"{len(shape.tensors)} tensors cross a cut: too many to announce")
    return torch.tensor(numbers + [0] * (_ANNOUNCED - len(numbers)), dtype=torch.int64)


def _announced(announcement: Tensor) -> ActivationShape:
    numbers = iter(announcement.tolist())
    is_tuple, tensors = bool(next(numbers)), next(numbers)
    shapes = []
    for _ in range(tensors):
        dtype, dimensions = _DTYPES[next(numbers)], next(numbers)
        shapes.append(TensorShape(row_shape=tuple(next(numbers) for _ in range(dimensions)), dtype=dtype))
    return ActivationShape(tensors=tuple(shapes), is_tuple=is_tuple)
