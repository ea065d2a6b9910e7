"""A model given as a list of layers, run one after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from runtime.layers.activations import Activation
from runtime.training import Batch


class LayerChain:
    """The user's layers: each takes what the one before returned, the first takes the samples' input."""

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
        """Name the layer for people."""
        return f"layer {layer} ({type(self.layers[layer]).__name__})"

    def kind(self, layer: int) -> str:
        """Name what the layer is, without its place."""
        return type(self.layers[layer]).__name__

    def modules(self) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
        """Yield every module with its name and the layers that it belongs to, in model order."""
        for index, layer in enumerate(self.layers):
            for prefix, module in layer.named_modules(remove_duplicate=False):
                yield f"{index}.{prefix}" if prefix else f"{index}", module, (index,)

    def in_block(self, name: str) -> bool:
        """Return whether the submodule is a part of a layer: here every one is."""
        return True

    def code_scopes(self, first: int, end: int) -> Iterator[tuple[int, bool]]:
        """Yield which code layers [first, end) run, in order: of which layer, and whether of its block."""
        for layer in range(first, end):
            yield layer, True

    def input_of(self, batch: Batch) -> Activation:
        """Return what the first layer takes of a batch of (input, target)."""
        return tuple(batch[0]) if isinstance(batch[0], list | tuple) else batch[0]

    def signature(self, batch: Batch) -> Any:
        """Return ``None``: all microbatches have the same shapes."""
        return None


def normalises_over_rows(module: nn.Module) -> bool:
    """Whether batch normalisation inside makes the rows of a microbatch influence each other."""
    kinds = nn.modules.batchnorm._BatchNorm
    return any(
        isinstance(inner, kinds) and not isinstance(inner, nn.modules.instancenorm._InstanceNorm)
        for inner in module.modules()
    )
