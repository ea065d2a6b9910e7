"""Whether every layer is alive, and which nodes a plan needs if it has fewer slots than there are nodes.

Only nodes of the plan can send state. If some nodes stay idle, the nodes with a slot must hold every layer
together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import StateLostError

Held = tuple[int, ...]
"""Layers that each device of a node holds, as the bits of an integer."""

Masks = dict[str, Held]


@dataclass(frozen=True, slots=True)
class StateNeeds:
    """State that the nodes of a plan must have together: items, as the bits of an integer."""

    held: Mapping[str, Sequence[int]]
    """Items that each device of a node has."""
    everything: int
    """All items."""
    layers: tuple[tuple[int, ...], ...]
    """Layers to which each item belongs."""

    def held_by(self, nodes: Iterable[str]) -> bool:
        """Return whether these nodes have every item."""
        return not self.everything & ~held_by(nodes, self.held)

    def of(self, items: int) -> list[int]:
        """Return the layers to which these items belong."""
        return sorted({layer for item in layers_of(items) for layer in self.layers[item]})


def whole_layers(masks: Mapping[str, Sequence[int]], layers: int) -> StateNeeds:
    """Return needs in which each layer is one item."""
    return StateNeeds(masks, (1 << layers) - 1, tuple((layer,) for layer in range(layers)))


def cover(nodes: Sequence[str], needs: StateNeeds, most: int) -> list[str]:
    """Return few nodes, at most ``most``, that have every item together.

    The item with the fewest kinds of holders is covered first, by the kind that has most of the missing
    items. So a first try nearly always succeeds, and the search is over kinds, not nodes.

    :raises StateLostError: there are no such nodes; the message names the layers.
    """
    masks, everything = needs.held, needs.everything
    lost = needs.of(everything & ~held_by(nodes, masks))
    if lost:
        raise StateLostError(f"no usable device holds {_layers(lost)}", tuple(lost))
    kinds: dict[int, str] = {}
    for node in nodes:
        kinds.setdefault(held_by([node], masks), node)
    # A kind that holds no more than another one is never needed.
    kinds = {
        held: node
        for held, node in kinds.items()
        if not any(held != other and held | other == other for other in kinds)
    }
    holders = {item: [held for held in kinds if held >> item & 1] for item in layers_of(everything)}

    tried: dict[int, int] = {}
    """Fewest nodes that were chosen, without success, when these items were missing."""

    def search(chosen: list[int], missing: int) -> list[int] | None:
        if not missing:
            return chosen
        if len(chosen) >= min(most, tried.get(missing, most)):
            tried.setdefault(missing, len(chosen))
            return None
        rarest = min(layers_of(missing), key=lambda item: (len(holders[item]), item))
        for held in sorted(holders[rarest], key=lambda held: -(held & missing).bit_count()):
            found = search([*chosen, held], missing & ~held)
            if found is not None:
                return found
        tried[missing] = len(chosen)
        return None

    found = search([], everything)
    if found is None:
        names = needs.of(min(tried, key=int.bit_count))
        raise StateLostError(
            f"{_layers(names)} are held only by nodes that no pipeline has a place for", tuple(names)
        )
    return [kinds[held] for held in found]


def held_by(nodes: Iterable[str], masks: Mapping[str, Sequence[int]]) -> int:
    """Return everything that these nodes hold, as bits."""
    held = 0
    for node in nodes:
        for mask in masks[node]:
            held |= mask
    return held


def layers_of(mask: int) -> list[int]:
    """Return the layers (or items) that an integer's bits stand for."""
    return [layer for layer in range(mask.bit_length()) if mask >> layer & 1]


def _layers(numbers: Sequence[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else "layers " + ", ".join(map(str, numbers))
