"""Whether every layer is alive, and on whom a plan with fewer places than nodes depends.

Only nodes of the plan can send. Where some stay idle, those with a place must hold every layer among them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import StateLostError

Held = tuple[int, ...]
"""For each device of a node, the layers it holds as the bits of an integer."""

Masks = dict[str, Held]


@dataclass(frozen=True, slots=True)
class StateNeeds:
    """What the nodes of a plan must have among them: items, as the bits of an integer."""

    held: Mapping[str, Sequence[int]]
    """For each device of a node, the items it has."""
    everything: int
    """All items."""
    layers: tuple[tuple[int, ...], ...]
    """What each item is of."""

    def held_by(self, nodes: Iterable[str]) -> bool:
        """Whether these nodes have every item."""
        return not self.everything & ~held_by(nodes, self.held)

    def of(self, items: int) -> list[int]:
        """The layers that these items are of."""
        return sorted({layer for item in layers_of(items) for layer in self.layers[item]})


def whole_layers(masks: Mapping[str, Sequence[int]], layers: int) -> StateNeeds:
    """A layer is held, or not."""
    return StateNeeds(masks, (1 << layers) - 1, tuple((layer,) for layer in range(layers)))


def cover(nodes: Sequence[str], needs: StateNeeds, most: int) -> list[str]:
    """Few nodes, at most ``most``, that have every item among them.

    The item with the fewest kinds of holders is covered first, by the kind that has most of what is
    missing; so a first try nearly always succeeds, and the search is over kinds, not nodes.

    :raises StateLostError: there are no such nodes; names the layers.
    """
    masks, everything = needs.held, needs.everything
    lost = needs.of(everything & ~held_by(nodes, masks))
    if lost:
        raise StateLostError(f"no usable device holds {_layers(lost)}", tuple(lost))
    kinds: dict[int, str] = {}
    for node in nodes:
        kinds.setdefault(held_by([node], masks), node)
    # Who holds no more than another is never needed.
    kinds = {
        held: node
        for held, node in kinds.items()
        if not any(held != other and held | other == other for other in kinds)
    }
    holders = {item: [held for held in kinds if held >> item & 1] for item in layers_of(everything)}

    tried: dict[int, int] = {}
    """Fewest nodes that were chosen when these items were missing, without success."""

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
    """All that these nodes hold, as bits."""
    held = 0
    for node in nodes:
        for mask in masks[node]:
            held |= mask
    return held


def layers_of(mask: int) -> list[int]:
    """The layers (or items) that an integer's bits stand for."""
    return [layer for layer in range(mask.bit_length()) if mask >> layer & 1]


def _layers(numbers: Sequence[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else "layers " + ", ".join(map(str, numbers))
