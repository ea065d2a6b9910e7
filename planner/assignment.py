"""Which named node takes which place, so that the fewest bytes move.

A *place* is one node of one pipeline: for each of its devices a range of layers. What a node must receive
for a place does not depend on who takes the others, so this is a linear assignment problem; and within a
node, which device takes which range is another.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from planner.errors import StateLostError
from planner.values import Device, ModelProfile, Template

Range = tuple[int, int]
Place = tuple[Range, ...]
"""Layers [first, end) of each device of the place."""

Position = tuple[int, int]
"""Pipeline and place in it, by number."""

Masks = dict[str, tuple[int, ...]]
"""Per node, for each device, the layers it holds as the bits of an integer."""


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts node-2 before node-10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def places_of(template: Template) -> tuple[Place, ...]:
    """One place per node of the template."""
    ranges: list[list[Range]] = [[] for _ in range(template.nodes)]
    for stage in template.stages:
        ranges[stage.node_offset] += [(stage.first_layer, stage.end_layer)] * stage.devices
    return tuple(tuple(place) for place in ranges)


class Assigner:
    """Assignments for one model; what a range lacks of a set of layers is remembered."""

    def __init__(self, profile: ModelProfile) -> None:
        self._state_bytes = [layer.state_bytes for layer in profile.layers]
        self._everything = (1 << len(profile.layers)) - 1
        self._missing: dict[tuple[int, Range], int] = {}
        self._inside: dict[tuple[tuple[int, ...], Place], tuple[int, tuple[int, ...]]] = {}

    def masks(self, nodes: Sequence[str], devices: int, holdings: dict[Device, frozenset[int]]) -> Masks:
        """What the devices of these nodes hold, by their index; a device without holdings holds nothing."""
        held: dict[str, tuple[int, ...]] = {}
        for node in nodes:
            found = [holdings.get(Device(node=node, index=index), frozenset()) for index in range(devices)]
            held[node] = tuple(sum(1 << layer for layer in layers) & self._everything for layers in found)
        return held

    def assign(
        self,
        pipelines: Sequence[Sequence[Place]],
        nodes: Sequence[str],
        masks: Masks,
        habits: dict[str, Position],
    ) -> list[list[str]]:
        """A node for each place of each pipeline; nodes that are left over stay idle.

        :param nodes: in natural order, at least as many as there are places.
        :param habits: (pipeline, place) that a node comes from; of equal costs, it stays there.
        :raises StateLostError: no choice of nodes for the places holds every layer.
        """
        places = [(number, offset) for number, slots in enumerate(pipelines) for offset in range(len(slots))]
        cost = self._cost_matrix(pipelines, places, nodes, masks, habits)
        chosen = _solve(cost)
        lacking = self._lacking([nodes[row] for row in chosen], masks)
        if lacking:
            needed = self._cover(lacking, nodes, masks, len(places))
            bonus = float(cost.sum()) + 1.0
            cost[[nodes.index(node) for node in needed]] -= bonus
            chosen = _solve(cost)
        taken: list[list[str]] = [[] for _ in pipelines]
        for (number, _), row in zip(places, chosen, strict=True):
            taken[number].append(nodes[row])
        return taken

    def order_inside(self, held: tuple[int, ...], place: Place) -> tuple[int, tuple[int, ...]]:
        """Bytes that a node must receive for a place, and which of its devices takes each range."""
        key = (held, place)
        known = self._inside.get(key)
        if known is None:
            if len(held) == 1:
                known = self._missing_bytes(held[0], place[0]), (0,)
            else:
                cost = np.array([[self._missing_bytes(mask, part) for part in place] for mask in held])
                rows = _solve(cost.astype(np.float64))
                known = int(cost[rows, range(len(place))].sum()), tuple(rows)
            self._inside[key] = known
        return known

    def devices_for(self, node: str, held: tuple[int, ...], place: Place) -> list[Device]:
        """The node's devices in the order of the place's ranges."""
        return [Device(node=node, index=index) for index in self.order_inside(held, place)[1]]

    def _missing_bytes(self, mask: int, part: Range) -> int:
        known = self._missing.get((mask, part))
        if known is None:
            lacking = [layer for layer in range(*part) if not mask >> layer & 1]
            known = self._missing[mask, part] = sum(self._state_bytes[layer] for layer in lacking)
        return known

    def _cost_matrix(
        self,
        pipelines: Sequence[Sequence[Place]],
        places: list[Position],
        nodes: Sequence[str],
        masks: Masks,
        habits: dict[str, Position],
    ) -> NDArray[np.float64]:
        """Shape (nodes, places): bytes first; then, in the units below one byte, how much changes."""
        cost = np.empty((len(nodes), len(places)))
        finest = 2 * len(places) + 1
        for row, node in enumerate(nodes):
            held, habit = masks[node], habits.get(node)
            for column, (number, offset) in enumerate(places):
                moved = self.order_inside(held, pipelines[number][offset])[0] * finest
                if habit is not None and habit != (number, offset):
                    moved += 1 if habit[0] == number else 2
                cost[row, column] = moved
        return cost

    def _lacking(self, chosen: Sequence[str], masks: Masks) -> set[int]:
        held = 0
        for node in chosen:
            for mask in masks[node]:
                held |= mask
        if held == self._everything:
            return set()
        return {layer for layer in range(len(self._state_bytes)) if not held >> layer & 1}

    def _cover(self, lacking: set[int], nodes: Sequence[str], masks: Masks, most: int) -> list[str]:
        """Few nodes, at most ``most``, that hold every layer among them.

        :raises StateLostError: there are none.
        """
        lost = sorted(self._lacking(nodes, masks))
        if lost:
            raise StateLostError(f"no usable device holds {_layers(lost)}", tuple(lost))
        holders = {
            layer: [node for node in nodes if any(mask >> layer & 1 for mask in masks[node])]
            for layer in range(len(self._state_bytes))
        }

        def search(chosen: list[str]) -> list[str] | None:
            missing = self._lacking(chosen, masks)
            if not missing:
                return chosen
            if len(chosen) == most:
                return None
            rarest = min(missing, key=lambda layer: (len(holders[layer]), layer))
            for node in holders[rarest]:
                found = search([*chosen, node])
                if found is not None:
                    return found
            return None

        found = search([])
        if found is None:
            names = sorted(lacking)
            raise StateLostError(
                f"{_layers(names)} are held only by nodes that no pipeline has a place for", tuple(names)
            )
        return found


def _solve(cost: NDArray[np.float64]) -> list[int]:
    """The row of each column; as many columns as rows or fewer."""
    if not (cost != cost[0, 0]).any():
        return list(range(cost.shape[1]))
    rows, columns = linear_sum_assignment(cost)
    chosen = [0] * cost.shape[1]
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        chosen[column] = row
    return chosen


def _layers(numbers: Sequence[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else "layers " + ", ".join(map(str, numbers))
