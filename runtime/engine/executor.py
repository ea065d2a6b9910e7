"""Runs one stage's list of 1F1B operations for one step.

Last stages compute each microbatch's loss as a sum and a weight. For the backward pass, sums are divided by
a constant. The sums of all gradients are divided by the total weight once, before the update, so they are
exactly those of the mean over the global batch, however it was cut.
"""

import torch
from torch import Tensor

from runtime.data.loader import BatchLoader
from runtime.engine.gradients import GradientBuffers
from runtime.engine.links import StageLinks
from runtime.engine.microbatches import StageMicrobatches, StageTotals
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
from runtime.groups.communicator import Communicator
from runtime.layers.finite_values import FiniteValues
from runtime.layers.model import Model
from runtime.layers.world import RankAssignment
from runtime.monitoring.progress import ProgressMonitor
from runtime.monitoring.stopwatch import Stopwatch


class StageExecutor:
    """The training steps of one rank's stage in one generation."""

    def __init__(
        self,
        *,
        model: Model,
        loader: BatchLoader,
        assignment: RankAssignment,
        communicator: Communicator,
        links: StageLinks,
        gradients: GradientBuffers,
        monitor: ProgressMonitor,
        values: FiniteValues,
    ) -> None:
        self._model = model
        self._values = values
        self._loader = loader
        self._assignment = assignment
        self._communicator = communicator
        self._links = links
        self._gradients = gradients
        self._monitor = monitor
        self.stopwatch = Stopwatch(model.runtime, monitor)
        # With fewer rows than devices, some device of a stage has no rows and only takes part in SYNC.
        self._operations = (
            one_f_one_b(assignment.stage, assignment.stages, assignment.microbatches)
            if assignment.rows
            else ()
        )
        self._last = max((o.microbatch for o in self._operations if isinstance(o, Backward)), default=-1)

    def run(self, step: int, batch: int, scale: float) -> StageTotals:
        """Run COMPUTE of step ``step``; all-reduces of buckets are still running when it returns.

        :param batch: batch on which the step trains; random numbers of the layers follow from the step.
        :param scale: constant factor on the sums of losses whose gradients are computed.
        :raises CommunicationError: the group was aborted, or a peer is lost.
        :raises TrainingError: the data set, the collate function or the loss failed.
        """
        self._scale = scale
        self._totals = StageTotals()
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._output_gradients: dict[int, tuple[Tensor, ...]] = {}
        # Nothing here refers to this executor, so the memory of an abandoned step is freed with it at once.
        assignment, load, check = self._assignment, self._loader.load, self._communicator.check
        self._microbatches = StageMicrobatches(
            self._model,
            self._monitor,
            read=lambda microbatch: load(batch, assignment.first_microbatch + microbatch, check),
            assignment=lambda _: assignment,
            step=step,
            rows=assignment.microbatch_rows,
        )
        self._gradients.begin()
        self.stopwatch.begin_step()
        receives = (o for o in self._operations if isinstance(o, ReceiveActivation | ReceiveGradient))
        self._links.begin(receives, self._microbatches)
        self._values.begin_step(assignment.first_layer, assignment.end_layer)
        # A stage may take long: an abort does not wait for all of its layers.
        with self._model.observed(check, self._values):
            for operation in self._operations:
                check()
                self._monitor.tick()
                try:
                    self._do(operation)
                except Exception:
                    check()  # The model's code, or autograd, may have wrapped what an abort raised.
                    raise
        return self._totals

    def _do(self, operation: Operation) -> None:
        """Run one operation of the schedule."""
        match operation:
            case ReceiveActivation(microbatch=microbatch):
                self._inputs[microbatch] = self._links.receive()
            case Forward(microbatch=microbatch):
                self._forward(microbatch)
            case SendActivation(microbatch=microbatch):
                self._links.send_activation(microbatch, self._outputs[microbatch])
            case ReceiveGradient(microbatch=microbatch):
                self._output_gradients[microbatch] = self._links.receive()
            case Backward(microbatch=microbatch):
                self._backward(microbatch)
            case SendGradient(microbatch=microbatch):
                self._send_gradient(microbatch)

    def _forward(self, microbatch: int) -> None:
        received = self._inputs.get(microbatch, ())
        for tensor in received:
            tensor.requires_grad_(tensor.is_floating_point())
        outputs = self._microbatches.forward(microbatch, received, self._totals, self.stopwatch)
        if self._assignment.is_last:
            self._values.add("loss", self._assignment.end_layer - 1, outputs[0])
            outputs = (outputs[0] * self._scale,)
        elif outputs and outputs[0].is_floating_point():
            self._values.add("output", self._assignment.end_layer - 1, outputs[0])
        self._outputs[microbatch] = outputs

    def _backward(self, microbatch: int) -> None:
        if microbatch == self._last:
            self._gradients.arm()
        outputs = self._outputs.pop(microbatch)
        if self._assignment.is_last:
            gradients: list[Tensor | None] = [None]
        else:
            arrived = iter(self._output_gradients.pop(microbatch))
            gradients = [next(arrived) if o.is_floating_point() else None for o in outputs]
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if not pairs:
            return
        with self._monitor.trace.span("backward", microbatch), self.stopwatch.time_microbatch(microbatch):
            try:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            except Exception:
                self._gradients.check()
                raise
            self._gradients.end_backward()

    def _send_gradient(self, microbatch: int) -> None:
        inputs = [x for x in self._inputs.pop(microbatch) if x.is_floating_point()]
        gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        for gradient in gradients:
            self._values.add("gradient", self._assignment.first_layer, gradient)
        self._links.send_gradient(microbatch, gradients)
