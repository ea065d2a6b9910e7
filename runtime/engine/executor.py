"""Runs one stage's list of 1F1B operations for one step.

A stage on several devices splits each microbatch by rows; activations and their gradients go straight
between the devices whose rows overlap, whatever the number of devices on either side.

The loss of a part of a microbatch is weighted by its rows over the global batch, so gradients that are
summed over microbatches, devices and pipelines are exactly those of the mean over the global batch.
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.data.sampling import Sampler
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
from runtime.layers.activations import Activation, flatten
from runtime.layers.model import Model
from runtime.layers.world import Route, Seat
from runtime.watch.pace import Pace
from runtime.watch.stopwatch import Stopwatch
from runtime.wire.protocol import TrainingData

_PREFETCH = 2
"""Receives posted before they are needed: gloo moves nothing before the receiver has posted."""

Arriving = tuple[tuple[Tensor, ...], list[Pending]]


class StageExecutor:
    """One rank's stage for one generation. Buffers are allocated per microbatch, never reused."""

    def __init__(
        self,
        *,
        model: Model,
        data: TrainingData,
        sampler: Sampler,
        seat: Seat,
        communicator: Communicator,
        gradients: Gradients,
        pace: Pace,
    ) -> None:
        self._model = model
        self._data = data
        self._sampler = sampler
        self._seat = seat
        self._communicator = communicator
        self._gradients = gradients
        self._pace = pace
        self._stopwatch = Stopwatch(model.device, pace)
        # With fewer rows than devices some device of a stage has none, and nothing to do but to sync.
        self._operations = one_f_one_b(seat.stage, seat.stages, seat.microbatches) if seat.rows else ()
        self._last = max((o.microbatch for o in self._operations if isinstance(o, Backward)), default=-1)
        self._reset()

    def _reset(self) -> None:
        self._step = 0
        self._indices: list[int] = []
        self._targets: dict[int, Tensor] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._output_gradients: dict[int, tuple[Tensor, ...]] = {}
        self._arriving: deque[Arriving] = deque()
        self._to_post: Iterator[Operation] = iter(())
        self._loss: Tensor = torch.zeros((), dtype=torch.float64, device=self._model.device)

    def run(self, step: int) -> float:
        """COMPUTE of step ``step``; bucket all-reduces are under way when it returns.

        :returns: this rank's share of the mean loss over the global batch (0 but on last stages).
        :raises CommunicationError: aborted, or a peer is lost.
        """
        self._reset()
        self._step = step
        self._indices = self._sampler.indices(step)
        self._to_post = (o for o in self._operations if isinstance(o, ReceiveActivation | ReceiveGradient))
        self._gradients.begin()
        self._stopwatch.begin()
        for _ in range(_PREFETCH):
            self._post_receive()
        for operation in self._operations:
            self._communicator.check()
            self._pace.tick()
            match operation:
                case ReceiveActivation(microbatch=microbatch):
                    self._inputs[microbatch] = self._receive()
                case Forward(microbatch=microbatch):
                    self._forward(microbatch)
                case SendActivation(microbatch=microbatch):
                    self._send(self._outputs[microbatch], self._seat.following, "activation")
                case ReceiveGradient(microbatch=microbatch):
                    self._output_gradients[microbatch] = self._receive()
                case Backward(microbatch=microbatch):
                    self._backward(microbatch)
                case SendGradient(microbatch=microbatch):
                    self._send_gradient(microbatch)
        return float(self._loss)

    def microbatch_ms(self) -> float:
        """Of the last step: ``Stopwatch.microbatch_ms``."""
        return self._stopwatch.microbatch_ms()

    # --- computing -----------------------------------------------------------------------------

    def _forward(self, microbatch: int) -> None:
        seat, model = self._seat, self._model
        row = (seat.first_microbatch + microbatch) * self._data.microbatch_rows + seat.first_row
        x = self._input(microbatch, row)
        with self._pace.trace.span("forward", microbatch), self._stopwatch.computing(microbatch):
            output = model.forward(seat.first_layer, seat.end_layer, x, step=self._step, row=row)
            if seat.is_last:
                loss = model.training.loss(output, self._targets.pop(microbatch)).squeeze()
                loss = loss * (seat.rows / self._data.global_batch)
                self._loss += loss.detach()
                self._outputs[microbatch] = (loss,)
            else:
                self._outputs[microbatch] = flatten(output)

    def _input(self, microbatch: int, row: int) -> Activation:
        """What the stage's first layer takes: samples, or what the previous stage sent."""
        seat, model = self._seat, self._model
        if seat.is_first or seat.is_last:
            indices = self._indices[row : row + seat.rows]
            with self._pace.read():
                samples, targets = self._sampler.load(model.training.dataset, indices)
            if seat.is_last:
                self._targets[microbatch] = targets.to(model.device)
            if seat.is_first:
                return samples.to(model.device)
        tensors = self._inputs[microbatch]
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
        return model.output_shapes()[seat.first_layer - 1].assemble(tensors)

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

    def _send(self, tensors: tuple[Tensor, ...], routes: tuple[Route, ...], channel: Channel) -> None:
        for route in routes:
            for tensor in tensors:
                part = tensor.detach()[route.start : route.end].contiguous()
                self._communicator.send(part, route.peer, channel)

    def _send_gradient(self, microbatch: int) -> None:
        inputs = [x for x in self._inputs.pop(microbatch) if x.is_floating_point()]
        gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        self._send(gradients, self._seat.previous, "gradient")

    def _post_receive(self) -> None:
        """Post the receive that stands next in the list of operations."""
        operation = next(self._to_post, None)
        if operation is None:
            return
        seat, shapes = self._seat, self._model.output_shapes()
        channel: Channel
        if isinstance(operation, ReceiveActivation):
            channel, routes = "activation", seat.previous
            tensors = shapes[seat.first_layer - 1].allocate(seat.rows, self._model.device)
        else:
            channel, routes = "gradient", seat.following
            whole = shapes[seat.end_layer - 1].allocate(seat.rows, self._model.device)
            tensors = tuple(tensor for tensor in whole if tensor.is_floating_point())
        pendings = [
            self._communicator.receive(tensor[route.start : route.end], route.peer, channel)
            for route in routes
            for tensor in tensors
        ]
        self._arriving.append((tensors, pendings))

    def _receive(self) -> tuple[Tensor, ...]:
        """The oldest posted receive, complete."""
        tensors, pendings = self._arriving.popleft()
        for pending in pendings:
            self._pace.wait(self._communicator, pending, "bubble")
        self._post_receive()
        return tensors
