"""A model that the user gives as a list of layers, which run one after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from runtime.layers.activations import Activation
from runtime.training import Batch


class LayerChain:
    """The user's list of layers: each takes the output of the previous one, and the first takes the input of
    the samples.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)

    @property
    def roots(self) -> list[nn.Module]:
        return self.layers

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def couples_rows(self) -> bool:
        """Whether a layer normalises over the rows of a microbatch."""
        return any(normalises_over_rows(layer) for layer in self.layers)

    def name(self, layer: int) -> str:
        """Return the layer's name for messages."""
        return f"layer {layer} ({type(self.layers[layer]).__name__})"

    def kind(self, layer: int) -> str:
        """Return the name of the layer's class, which does not contain its position."""
        return type(self.layers[layer]).__name__

    def modules(self) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
        """Yield every module with its name and the layers that it belongs to, in model order."""
        for index, layer in enumerate(self.layers):
            for prefix, module in layer.named_modules(remove_duplicate=False):
                yield f"{index}.{prefix}" if prefix else f"{index}", module, (index,)

    def in_block(self, name: str) -> bool:
        """Return ``True``: every submodule is inside a layer's block."""
        return True

    def code_scopes(self, first: int, end: int) -> Iterator[tuple[int, bool]]:
        """Yield the code that layers [first, end) run, in order: the layer, and whether the code is in the
        layer's block.
        """
        for layer in range(first, end):
            yield layer, True

    def input_of(self, batch: Batch) -> Activation:
        """Return the first layer's input from a batch of (input, target)."""
        return tuple(batch[0]) if isinstance(batch[0], list | tuple) else batch[0]

    def signature(self, batch: Batch, rows: int) -> Any:
        """Return ``None``: all microbatches have the same shapes."""
        return None


def normalises_over_rows(module: nn.Module) -> bool:
    """Return whether ``module`` contains batch normalisation that makes the rows of a microbatch depend on each
    other; with fixed statistics, in evaluation mode, it does not.
    """
    kinds = nn.modules.batchnorm._BatchNorm
    return any(
        isinstance(inner, kinds)
        and not isinstance(inner, nn.modules.instancenorm._InstanceNorm)
        and (inner.training or inner.running_mean is None)
        for inner in module.modules()
    )
