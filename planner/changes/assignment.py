"""Which named node takes which place, so that the fewest bytes move.

A *place* is one node of one pipeline: for each of its devices a range of layers. What a node must receive
for a place does not depend on who takes the others, so this is a linear assignment problem; and within a
node, which device takes which range is another.

Most of it is solved at sight. Let node a hold exactly what place P needs, so that it receives nothing there.
Whatever a node b lacks of another place Q, it lacks of what b lacks of P (= of what a holds) or is lacked by
a: bytes(b, Q) ≤ bytes(b, P) + bytes(a, Q). So where an optimum has a in Q and b in P (or a idle), changing
the two is an optimum, too: every such pair may be seated first, and only the others are solved for.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from planner.changes.cover import Held, Masks, StateNeeds, cover, layers_of, whole_layers
from planner.changes.transition import MemoryHeadroom
from planner.errors import StateLostError
from planner.values import Device, ModelProfile, Template

Kind = TypeVar("Kind", bound=Hashable)
Floats = NDArray[np.float64]
Range = tuple[int, int]
NodeSlot = tuple[Range, ...]
"""Layers [first, end) of each device of the place."""

Position = tuple[int, int]
"""Pipeline and place in it, by number."""


@lru_cache(maxsize=1 << 16)
def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts node-2 before node-10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def template_slots(template: Template) -> tuple[NodeSlot, ...]:
    """One place per node of the template."""
    ranges: list[list[Range]] = [[] for _ in range(template.nodes)]
    for stage in template.stages:
        ranges[stage.node_offset] += [(stage.first_layer, stage.end_layer)] * stage.devices
    return tuple(tuple(place) for place in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A node for each place of each pipeline, and what it costs."""

    taken: tuple[tuple[str, ...], ...]
    moved_bytes: int
    excess_bytes: int
    """Of old layers that devices have no room for beside their new stages."""
    received_bytes: int
    """By the device that receives most."""
    sent_bytes: float
    """By the device that sends most, where each layer's bytes are spread evenly over its holders."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """Nodes that hold the same in places that need the same."""

    order: tuple[int, ...]
    """The device that takes each range."""
    lacking: tuple[int, ...]
    """What that device lacks of it, as bits."""


class Assigner:
    """Assignments for one model."""

    def __init__(self, profile: ModelProfile) -> None:
        self._layers = len(profile.layers)
        self._state_bytes = [layer.state_bytes for layer in profile.layers]
        self._sizes: Floats = np.array(self._state_bytes, dtype=np.float64)
        self._everything = (1 << self._layers) - 1
        self._fits: dict[tuple[Held, NodeSlot], _Fit] = {}

    def masks(self, nodes: Iterable[str], devices: int, holdings: Mapping[Device, frozenset[int]]) -> Masks:
        """What the devices of these nodes hold, by their index; a device without holdings holds nothing."""
        held = {node: [0] * devices for node in nodes}
        known: dict[frozenset[int], int] = {}
        for device, layers in holdings.items():
            of_node = held.get(device.node)
            if of_node is not None and 0 <= device.index < devices:
                mask = known.get(layers)
                if mask is None:
                    mask = known[layers] = sum(1 << layer for layer in layers) & self._everything
                of_node[device.index] = mask
        return {node: tuple(of_node) for node, of_node in held.items()}

    def assign(
        self,
        pipelines: Sequence[Sequence[NodeSlot]],
        nodes: Sequence[str],
        masks: Masks,
        habits: Mapping[str, Position],
        needs: StateNeeds | None = None,
        rooms: Sequence[Sequence[MemoryHeadroom]] = (),
    ) -> Assignment:
        """The fewest bytes over all choices of nodes that hold every layer; others stay idle.

        A byte of old layers that a device has no room for counts as one that moves. Where there are such bytes, all
        nodes are solved for, as seating at sight is an optimum of those that move alone.

        :param nodes: in natural order, at least as many as there are places.
        :param needs: what must be held instead of every layer of ``masks``.
        :param habits: (pipeline, place) that a node comes from; where it moves no more, it stays there.
        :param rooms: of the places of each pipeline; empty where memory has no limit, or old layers take none.
        :raises StateLostError: no choice of nodes for the places holds every layer.
        """
        places = [
            ((number, offset), place)
            for number, slots in enumerate(pipelines)
            for offset, place in enumerate(slots)
        ]
        room_of = {
            (number, offset): room for number, of in enumerate(rooms) for offset, room in enumerate(of)
        }
        needs = needs or whole_layers(masks, self._layers)

        def seat(seated: dict[Position, str]) -> Assignment:
            self._assign_others(seated, places, nodes, masks, habits, (), room_of)
            if not needs.held_by(seated.values()):
                needed = cover(nodes, needs, len(places))
                seated = {}
                self._assign_others(seated, places, nodes, masks, habits, needed, room_of)
            return self._assignment(pipelines, seated, masks, room_of)

        found = seat(_assign_exact(places, nodes, masks, habits))
        if found.excess_bytes:
            found = min(found, seat({}), key=lambda each: each.moved_bytes + each.excess_bytes)
        return found

    def order_inside(self, held: Held, place: NodeSlot) -> tuple[int, ...]:
        """Which of a node's devices takes each range of a place, so that the fewest bytes move."""
        return self._fit(held, place).order

    def _fit(self, held: Held, place: NodeSlot) -> _Fit:
        key = (held, place)
        fit = self._fits.get(key)
        if fit is None:
            wanted = [(1 << end) - (1 << first) for first, end in place]
            order = tuple(range(len(held)))
            if len(set(held)) > 1 and len(set(place)) > 1:
                order = tuple(solve(self._missing(list(held), list(place))))
            lacking = tuple(mask & ~held[index] for mask, index in zip(wanted, order, strict=True))
            fit = self._fits[key] = _Fit(order, lacking)
        return fit

    def _assign_others(
        self,
        seated: dict[Position, str],
        places: Sequence[tuple[Position, NodeSlot]],
        nodes: Sequence[str],
        masks: Masks,
        habits: Mapping[str, Position],
        needed: Sequence[str],
        room_of: Mapping[Position, MemoryHeadroom],
    ) -> None:
        """Nodes for the places that are not ``seated`` yet, from those that are not, into ``seated``.

        :param needed: nodes that must have a place.
        """
        sitting = set(seated.values())
        free = [node for node in nodes if node not in sitting]
        open_places = [(position, place) for position, place in places if position not in seated]
        if not open_places:
            return
        kinds, row_kind = _numbered([masks[node] for node in free])
        wanted, column_kind = _numbered([(place, room_of.get(position)) for position, place in open_places])
        # Whole rows are copied at last, which is quick.
        cost = (self._costs(kinds, wanted) * (2 * len(places) + 1))[:, column_kind][row_kind]
        _add_changes(cost, free, [position for position, _ in open_places], habits)
        if needed:
            must = set(needed)
            cost[[row for row, node in enumerate(free) if node in must]] -= (
                float(cost.max(axis=0).sum()) + 1.0
            )
        for (position, _), row in zip(open_places, solve(cost), strict=True):
            seated[position] = free[row]

    def _missing(self, held: Sequence[int], ranges: Sequence[Range]) -> Floats:
        """Bytes that devices with ``held`` lack of ``ranges``; shape (held, ranges)."""
        before = np.zeros((len(held), self._layers + 1))
        np.cumsum((1 - bits(held, self._layers)) * self._sizes, axis=1, out=before[:, 1:])
        edges = np.array(ranges)
        missing: Floats = before[:, edges[:, 1]] - before[:, edges[:, 0]]
        return missing

    def _costs(
        self, kinds: Sequence[Held], wanted: Sequence[tuple[NodeSlot, MemoryHeadroom | None]]
    ) -> Floats:
        """Bytes that a node of each kind must receive for each place, and of old layers that it has no room for;
        shape (kinds, wanted)."""
        masks, mask_of = _numbered([mask for held in kinds for mask in held])
        ranges, range_of = _numbered([part for place, _ in wanted for part in place])
        devices = len(kinds[0])
        rows = mask_of.reshape(len(kinds), devices)
        columns = range_of.reshape(len(wanted), devices)
        missing = self._missing(masks, ranges)
        moved: Floats = np.zeros((len(kinds), len(wanted)))
        for device in range(devices):
            moved += missing[rows[:, device]][:, columns[:, device]]
        if any(room is not None for _, room in wanted):
            rooms = np.array([[np.inf] * devices if room is None else room for _, room in wanted])
            old = self._old(masks, ranges, missing)
            for device in range(devices):
                of_device = old[rows[:, device]][:, columns[:, device]]
                moved += np.clip(of_device - rooms[:, device], 0.0, of_device)
        mixed = (rows != rows[:, :1]).any(axis=1)[:, None] & (columns != columns[:, :1]).any(axis=1)
        for kind, place in np.argwhere(mixed):
            inside = missing[rows[kind]][:, columns[place]]
            order = solve(inside)
            moved[kind, place] = inside[order, range(devices)].sum()
            if wanted[place][1] is not None:
                of_order = old[rows[kind][order], columns[place]]
                moved[kind, place] += np.clip(of_order - rooms[place], 0.0, of_order).sum()
        return moved

    def _old(self, masks: Sequence[int], ranges: Sequence[Range], missing: Floats) -> Floats:
        """Bytes that devices hold outside of the ranges; shape (masks, ranges)."""
        edges, ends = np.array(ranges), np.concatenate(([0.0], np.cumsum(self._sizes)))
        inside = ends[edges[:, 1]] - ends[edges[:, 0]] - missing
        old: Floats = (bits(masks, self._layers) @ self._sizes)[:, None] - inside
        return old

    def _excess(self, held: Held, place: NodeSlot, room: MemoryHeadroom) -> int:
        """Bytes of old layers that a node's devices have no room for in a place."""
        excess = 0
        for (first, end), index, free in zip(place, self._fit(held, place).order, room, strict=True):
            old = self._bytes(held[index] & ~((1 << end) - (1 << first)))
            excess += min(max(old - free, 0), old)
        return excess

    def _bytes(self, mask: int) -> int:
        return sum(self._state_bytes[layer] for layer in layers_of(mask))

    def _assignment(
        self,
        pipelines: Sequence[Sequence[NodeSlot]],
        seated: Mapping[Position, str],
        masks: Masks,
        room_of: Mapping[Position, MemoryHeadroom],
    ) -> Assignment:
        taken: list[tuple[str, ...]] = []
        pairs: dict[tuple[Held, NodeSlot], int] = {}
        crowded: dict[tuple[Held, NodeSlot, MemoryHeadroom], int] = {}
        for number, slots in enumerate(pipelines):
            names = tuple(seated[number, offset] for offset in range(len(slots)))
            taken.append(names)
            for offset, (node, place) in enumerate(zip(names, slots, strict=True)):
                key = (masks[node], place)
                pairs[key] = pairs.get(key, 0) + 1
                room = room_of.get((number, offset))
                if room is not None:
                    crowded[*key, room] = crowded.get((*key, room), 0) + 1
        targets: dict[int, int] = {}
        holders: dict[int, int] = {}
        for (held, place), count in pairs.items():
            for mask, lacking in zip(held, self._fit(held, place).lacking, strict=True):
                holders[mask] = holders.get(mask, 0) + count
                if lacking:
                    targets[lacking] = targets.get(lacking, 0) + count
        bytes_of = {mask: self._bytes(mask) for mask in targets}
        return Assignment(
            taken=tuple(taken),
            moved_bytes=sum(bytes_of[mask] * count for mask, count in targets.items()),
            excess_bytes=sum(self._excess(*case) * count for case, count in crowded.items()),
            received_bytes=max(bytes_of.values(), default=0),
            sent_bytes=self._fullest_sender(targets, holders),
        )

    def _fullest_sender(self, targets: Mapping[int, int], holders: Mapping[int, int]) -> float:
        """:param targets, holders: numbers of devices by the layers that they lack, or hold."""
        if not targets:
            return 0.0
        held = bits(list(holders), self._layers)
        copies = held.T @ np.array(list(holders.values()), dtype=np.float64)
        wanted = bits(list(targets), self._layers).T @ np.array(list(targets.values()), dtype=np.float64)
        if (copies[wanted > 0] == 0).any():
            raise StateLostError("no device of the plan holds a layer that must move", ())
        return float((held @ (wanted * self._sizes / np.maximum(copies, 1.0))).max())


def _assign_exact(
    places: Sequence[tuple[Position, NodeSlot]],
    nodes: Sequence[str],
    masks: Masks,
    habits: Mapping[str, Position],
) -> dict[Position, str]:
    """Nodes in places that need exactly what they hold: those that come from there, then any.

    Of the nodes that hold the same, those that come from nowhere in this layout go to others' places first.
    """
    exactly: dict[NodeSlot, Held] = {
        place: tuple(sorted((1 << end) - (1 << first) for first, end in place)) for _, place in places
    }
    sorted_held = {held: tuple(sorted(held)) for held in set(masks.values())}
    seated: dict[Position, str] = {}
    at_home = {position: node for node, position in habits.items() if node in masks}
    for position, place in places:
        node = at_home.get(position)
        if node is not None and sorted_held[masks[node]] == exactly[place]:
            seated[position] = node
    sitting = set(seated.values())
    waiting: dict[Held, list[str]] = {}
    for node in sorted((node for node in nodes if node not in sitting), key=lambda node: node in habits):
        waiting.setdefault(sorted_held[masks[node]], []).append(node)
    for queue in waiting.values():
        queue.reverse()
    for position, place in places:
        queue = waiting.get(exactly[place], [])
        if position not in seated and queue:
            seated[position] = queue.pop()
    return seated


def _add_changes(
    cost: Floats, free: Sequence[str], positions: Sequence[Position], habits: Mapping[str, Position]
) -> None:
    """Who would leave its place costs 1 more, who would leave its pipeline 2; shape (free, positions)."""
    columns: dict[int, list[tuple[int, int]]] = {}
    for column, (number, offset) in enumerate(positions):
        columns.setdefault(number, []).append((column, offset))
    at: list[tuple[int, int, float]] = []
    for row, node in enumerate(free):
        home = habits.get(node)
        if home is not None:
            cost[row] += 2.0
            of_pipeline = columns.get(home[0], ())
            at += [(row, column, 2.0 if offset == home[1] else 1.0) for column, offset in of_pipeline]
    if at:
        rows, places, saved = zip(*at, strict=True)
        cost[rows, places] -= saved


def _numbered(items: Sequence[Kind]) -> tuple[list[Kind], NDArray[np.int64]]:
    """The different ones, and for each item which of them it is."""
    numbers: dict[Kind, int] = {}
    of_items = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), np.array(of_items, dtype=np.int64)


def bits(masks: Sequence[int], count: int) -> Floats:
    """1 where a mask has a bit, else 0; shape (masks, count)."""
    size = -(-count // 8)
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), dtype=np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(masks), size), axis=1, count=count, bitorder="little")
    return unpacked.astype(np.float64)


def solve(cost: Floats) -> list[int]:
    """The row of each column, of the least sum; as many columns as rows or fewer."""
    if (cost == cost[0, 0]).all():
        return list(range(cost.shape[1]))
    rows, columns = linear_sum_assignment(cost)
    chosen = [0] * cost.shape[1]
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        chosen[column] = row
    return chosen
