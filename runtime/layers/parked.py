"""Layers in host memory while their device has no room for them.

A layer is parked from before new state arrives until the first commit of a generation, as the plan says
(``planner.changes.transition``). A parked layer counts as held: it can be sent from host memory, and moves
back to the device if the next plan assigns it to this rank. Where state is in parts,
``runtime.zero.sharding`` parks it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates


@dataclass(frozen=True, slots=True)
class ParkedPayload:
    """The header and payload of a transfer, stored as a whole."""

    header: bytes
    payload: Tensor
    """Bytes in host memory."""

    @property
    def size_bytes(self) -> int:
        return self.payload.numel()

    def read(self, start: int, end: int) -> Tensor:
        """Return bytes [start, end) of the payload as a view."""
        return self.payload[start:end]


class ParkedLayers:
    """The parked layers of one rank, all at its committed step."""

    def __init__(self, model: Model, optimization: Optimization, states: LayerStates) -> None:
        self._model = model
        self._optimization = optimization
        self._states = states
        self._layers: dict[int, ParkedPayload] = {}

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._layers)

    def get(self, layer: int) -> ParkedPayload | None:
        """Return the layer's payload, or ``None`` if it is not parked."""
        return self._layers.get(layer)

    def park(self, layer: int) -> None:
        """Move a held layer from the device to host memory."""
        self._layers[layer] = ParkedPayload(*self._states.pack(layer))
        self._model.drop([layer])
        self._optimization.release_dropped()

    def unpark(self, layer: int) -> None:
        """Move a parked layer back to the device."""
        parked = self._layers.pop(layer)
        self._states.unpack(layer, parked.header, parked.payload)

    def free(self, layers: Collection[int] | None = None) -> None:
        """Free these layers; all parked layers if ``layers`` is ``None``."""
        for layer in self._layers.keys() & (self._layers if layers is None else layers):
            del self._layers[layer]
