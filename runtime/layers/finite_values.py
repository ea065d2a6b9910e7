"""Finds the first value of a step that was not finite, on one rank.

While a step runs, each layer's output and its gradient are summed on the device, which reads each of them
once; nothing waits for the sums. They are looked at only if the step's update is skipped: a sum is NaN or
infinite if one of its values is.
"""

from collections.abc import Iterable
from typing import get_args

import torch
from torch import Tensor

from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.values import NotFiniteValue

VALUES: tuple[NotFiniteValue, ...] = get_args(NotFiniteValue)
"""Kinds of values in the order in which a step computes them."""


class FiniteValues:
    """The sums of one rank's values of the step that runs."""

    def __init__(self, layer_count: int) -> None:
        self._layer_count = self._end_layer = layer_count
        self._first_layer = 0
        self._codes: list[int] = []
        self._sums: list[Tensor] = []

    def begin_step(self, first_layer: int, end_layer: int) -> None:
        """Forget the last step; the rank's stage has layers ``[first_layer, end_layer)``."""
        self._first_layer, self._end_layer = first_layer, end_layer
        self._codes, self._sums = [], []

    def add(self, value: NotFiniteValue, layer: int, tensor: Tensor) -> None:
        """Record a value that a layer computed."""
        self._codes.append(self.code(value, layer))
        tensor = tensor.detach()
        self._sums.append(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)))

    def add_input(self, layer: int, tensor: Tensor) -> None:
        """Record a layer's input as the output of the previous layer, if that one has no block, and so no output
        that was recorded, and is in the same stage.
        """
        if layer > self._first_layer and self.code("output", layer - 1) not in self._codes:
            self.add("output", layer - 1, tensor)

    def add_output_gradient(self, layer: int, gradient: Tensor) -> None:
        """Record the gradient of a layer's output, which the backward pass of the next layer computed (or of
        the loss, which counts as the last layer). A gradient that another stage computed is recorded there.
        """
        if layer + 1 < self._end_layer or self._end_layer == self._layer_count:
            self.add("gradient", min(layer + 1, self._layer_count - 1), gradient)

    def find_first(self, monitor: ProgressMonitor, gradients: Iterable[int]) -> int:
        """Return the code of the first value that is not finite, or 0 if there is none.

        :param gradients: layers of which a parameter has a gradient that is not finite, summed over all
            owners.
        """
        codes = [self.code("parameter_gradient", layer) for layer in gradients]
        if self._sums:
            sums = torch.stack([one.double() for one in self._sums])
            finite = monitor.read_values(sums.isfinite())
            codes += [code for code, here in zip(self._codes, finite, strict=True) if not here]
        return min(codes, default=0)

    def code(self, value: NotFiniteValue, layer: int) -> int:
        """Return a number, from 1, that is lower for a value that a step computes earlier."""
        number = VALUES.index(value)
        backward = value in ("gradient", "parameter_gradient")
        position = self._layer_count - 1 - layer if backward else layer
        return 1 + number * self._layer_count + position

    def meaning(self, code: int) -> tuple[NotFiniteValue, int]:
        """Return the kind of value and the layer that a code stands for."""
        number, position = divmod(code - 1, self._layer_count)
        backward = VALUES[number] in ("gradient", "parameter_gradient")
        return VALUES[number], self._layer_count - 1 - position if backward else position
