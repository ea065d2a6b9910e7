"""Layers compiled with ``torch.compile``, one by one, which fall back to the plain layer if the compiler
fails.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.exc


class CompiledLayer:
    """A compiled function of a layer, called in place of the function itself.

    Blocks of one class share their compiled code. The compiler's results stay in its cache on this host's
    disk, so a trainer that starts again does not compile again.

    :param name: the layer's name, for the warning that it cannot be compiled.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._plain = function
        self._name = name
        self._fast: Callable[..., Any] | None = torch.compile(function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._fast is not None:
            try:
                return self._fast(*arguments, **named)
            except torch._dynamo.exc.TorchDynamoException as error:
                self._fast = None
                reason = (str(error).strip().splitlines() or [""])[0]
                warnings.warn(
                    f"{self._name} runs without torch.compile: {type(error).__name__}: {reason}", stacklevel=2
                )
        return self._plain(*arguments, **named)
