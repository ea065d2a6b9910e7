"""The microbatches of one step or one held-out batch, as seen by one rank's stage."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import Batch, signature, slice_rows, to_device
from runtime.layers.activations import Activation, flatten, shape_of
from runtime.layers.model import Model
from runtime.layers.world import RankAssignment
from runtime.monitoring.progress import ProgressMonitor
from runtime.monitoring.stopwatch import Stopwatch


@dataclass(slots=True)
class StageTotals:
    """Sums over one rank's rows of a step or a held-out batch; only last stages have any."""

    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    weight: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sum and weight by name."""

    def add(self, loss: Tensor, weight: Tensor, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add one microbatch without waiting for the device, where the sums stay."""
        self.loss = self.loss + loss.detach().double()
        self.weight = self.weight + weight
        for name, (total, count) in metrics.items():
            before = self.metrics.get(name)
            self.metrics[name] = (total, count) if before is None else (before[0] + total, before[1] + count)

    def to_list(self, metric_names: tuple[str, ...]) -> list[Tensor | float]:
        """Return the numbers that ranks sum: loss, weight, and sum and weight of each metric."""
        metrics = [number for name in metric_names for number in self.metrics.get(name, (0.0, 0.0))]
        return [self.loss, self.weight, *metrics]


class StageMicrobatches:
    """The rows of some microbatches that this rank computes; each microbatch is loaded when it is first
    needed.

    :param read: returns a whole microbatch on the host.
    :param assignment: returns the rank's assignment for a microbatch; the last one of a data set may have
        fewer rows.
    :param step: step from which random numbers follow, together with the row in the global batch.
    :param rows: rows of a whole microbatch that is not the last one of a data set.
    """

    def __init__(
        self,
        model: Model,
        monitor: ProgressMonitor,
        *,
        read: Callable[[int], Batch],
        assignment: Callable[[int], RankAssignment],
        step: int,
        rows: int,
    ) -> None:
        self._model = model
        self._monitor = monitor
        self._read = read
        self.assignment = assignment
        self._step = step
        self._rows = rows
        self._batches: dict[int, tuple[Batch, Batch, Batch]] = {}
        """The microbatches that are loaded: this rank's rows on its device, the same in host memory, and all rows."""
        self._signatures: dict[int, Any] = {}

    def batches(self, microbatch: int) -> tuple[Batch, Batch, Batch]:
        """Return this rank's rows of a microbatch on its device, and in host memory for code that must not wait for
        the device, and all rows there.
        """
        if microbatch not in self._batches:
            assignment = self.assignment(microbatch)
            with self._monitor.reading_data():
                whole = self._read(microbatch)
            own = slice_rows(
                whole,
                assignment.first_row,
                assignment.first_row + assignment.rows,
                assignment.microbatch_rows,
            )
            self._batches[microbatch] = to_device(own, self._model.device), own, whole
        return self._batches[microbatch]

    def signature(self, microbatch: int) -> Any:
        """Return the signature that the shapes of a microbatch's activations depend on."""
        if not self._model.needs_batch:
            return None
        if microbatch not in self._signatures:
            rows = self.assignment(microbatch).rows
            self._signatures[microbatch] = signature(self.batches(microbatch)[0], rows)
        return self._signatures[microbatch]

    def forward(
        self,
        microbatch: int,
        received: tuple[Tensor, ...],
        totals: StageTotals,
        stopwatch: Stopwatch,
        *,
        train: bool = True,
    ) -> tuple[Tensor, ...]:
        """Load a microbatch, and run and time the stage's layers on this rank's rows of it.

        :param received: output of the previous stage; empty on the first stage.
        :param totals: sums to which the last stage adds the microbatch's loss and metrics.
        :returns: the tensors for the next stage, or the last stage's sum of losses.
        """
        assignment, model = self.assignment(microbatch), self._model
        if model.needs_batch or assignment.is_first or assignment.is_last:
            self.batches(microbatch)
        batch, host_batch, whole = self._batches.get(microbatch, (None, None, None))
        row = (assignment.first_microbatch + microbatch) * self._rows + assignment.first_row
        layers = assignment.first_layer, assignment.end_layer
        with self._monitor.trace.span("forward", microbatch), stopwatch.time_microbatch(microbatch):
            x = None if assignment.is_first else self._assembled(microbatch, received)
            output = model.forward(
                *layers, x, step=self._step, row=row, rows=assignment.rows, batch=batch, train=train
            )
            if assignment.is_last:
                with torch.set_grad_enabled(train):
                    all_rows = whole, assignment.microbatch_rows
                    total, weight = model.loss(output, batch, assignment.rows, host_batch, all_rows)
                if assignment.is_representative:
                    totals.add(total, weight, model.loss.compute_metrics(output, batch, assignment.rows))
                outputs: tuple[Tensor, ...] = (total,)
            else:
                outputs = flatten(output)
                model.set_output_shape(assignment.end_layer - 1, self.signature(microbatch), shape_of(output))
        self._batches.pop(microbatch, None)
        return outputs

    def _assembled(self, microbatch: int, received: tuple[Tensor, ...]) -> Activation:
        """Return the output of the previous stage as the stage's first layer takes it."""
        layer = self.assignment(microbatch).first_layer - 1
        shape = self._model.output_shape(layer, self.signature(microbatch))
        assert shape is not None
        return shape.assemble(received)
