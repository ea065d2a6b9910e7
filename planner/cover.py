"""Whether every layer is alive, and on whom a plan with fewer places than nodes depends.

Only nodes of the plan can send. Where some stay idle, those with a place must hold every layer among them.
"""

from collections.abc import Iterable, Mapping, Sequence

from planner.errors import StateLostError


def cover(nodes: Sequence[str], masks: Mapping[str, Sequence[int]], everything: int, most: int) -> list[str]:
    """Few nodes, at most ``most``, that hold every layer among them.

    The layer with the fewest kinds of holders is covered first, by the kind that holds most of what is
    missing; so a first try nearly always succeeds, and the search is over kinds, not nodes.

    :param masks: for each device of a node, the layers it holds as the bits of an integer.
    :param everything: all layers as bits.
    :raises StateLostError: there are no such nodes; names the layers.
    """
    lost = layers_of(everything & ~held_by(nodes, masks))
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
    holders = {layer: [held for held in kinds if held >> layer & 1] for layer in layers_of(everything)}

    tried: dict[int, int] = {}
    """Fewest nodes that were chosen when these layers were missing, without success."""

    def search(chosen: list[int], missing: int) -> list[int] | None:
        if not missing:
            return chosen
        if len(chosen) >= min(most, tried.get(missing, most)):
            tried.setdefault(missing, len(chosen))
            return None
        rarest = min(layers_of(missing), key=lambda layer: (len(holders[layer]), layer))
        for held in sorted(holders[rarest], key=lambda held: -(held & missing).bit_count()):
            found = search([*chosen, held], missing & ~held)
            if found is not None:
                return found
        tried[missing] = len(chosen)
        return None

    found = search([], everything)
    if found is None:
        names = layers_of(min(tried, key=int.bit_count))
        raise StateLostError(
            f"{_layers(names)} are held only by nodes that no pipeline has a place for", tuple(names)
        )
    return [kinds[held] for held in found]


def held_by(nodes: Iterable[str], masks: Mapping[str, Sequence[int]]) -> int:
    """All layers that these nodes hold, as bits."""
    held = 0
    for node in nodes:
        for mask in masks[node]:
            held |= mask
    return held


def layers_of(mask: int) -> list[int]:
    """The layers that an integer's bits stand for."""
    return [layer for layer in range(mask.bit_length()) if mask >> layer & 1]


def _layers(numbers: Sequence[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else "layers " + ", ".join(map(str, numbers))
