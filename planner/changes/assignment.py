"""Assignment of nodes to the slots of pipelines, so that the fewest bytes move.

A *slot* is one node of one pipeline: for each of its devices a range of layers. The bytes that a node must
receive for a slot do not depend on the nodes in other slots, so this is a linear assignment problem; within
a node, the assignment of devices to ranges is another.

Most of it is solved directly. Let node a hold exactly what slot P needs, so that it receives nothing there.
Whatever a node b lacks of another slot Q, either a holds it, and b lacks it of P, too; or a lacks it:
bytes(b, Q) ≤ bytes(b, P) + bytes(a, Q). So where an optimum has a in Q and b in P (or a idle), exchanging
the two is an optimum, too: every such pair may be assigned first, and only the others are solved for.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.changes.cover import Held, Masks, StateNeeds, cover, layers_of, whole_layers
from planner.changes.transition import MemoryHeadroom
from planner.errors import StateLostError
from planner.values import Device, ModelProfile, Template

Kind = TypeVar("Kind", bound=Hashable)
Floats = NDArray[np.float64]
Range = tuple[int, int]
NodeSlot = tuple[Range, ...]
"""Layers [first, end) of each device of the slot."""

SlotParts = tuple[int, ...]
"""Number of parts into which the state of each device's range is divided, of which the device has one."""

Position = tuple[int, int]
"""Numbers of the pipeline and of the slot in it."""


def template_slots(template: Template) -> tuple[NodeSlot, ...]:
    """Return one slot per node of the template."""
    ranges: list[list[Range]] = [[] for _ in range(template.nodes)]
    for stage in template.stages:
        ranges[stage.node_offset] += [(stage.first_layer, stage.end_layer)] * stage.devices
    return tuple(tuple(slot) for slot in ranges)


def slot_parts(template: Template) -> tuple[SlotParts, ...]:
    """Return for each slot of ``template_slots`` into how many parts its devices' stages divide their state."""
    parts: list[list[int]] = [[] for _ in range(template.nodes)]
    for stage in template.stages:
        parts[stage.node_offset] += [stage.parts] * stage.devices
    return tuple(map(tuple, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A node for each slot of each pipeline, and the bytes that this moves."""

    taken: tuple[tuple[str, ...], ...]
    moved_bytes: int
    excess_bytes: int
    """Bytes of old layers that do not fit into the devices' memory in addition to their new stages."""
    received_bytes: int
    """Bytes received by the device that receives most."""
    sent_bytes: float
    """Bytes sent by the device that sends most, where each layer's bytes are spread evenly over its holders."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """Best order of the devices of nodes with equal holdings in equal slots."""

    order: tuple[int, ...]
    """Device that takes each range."""
    lacking: tuple[int, ...]
    """Layers of each range that its device lacks, as bits."""


class Assigner:
    """Solver of the assignments of one model."""

    def __init__(self, profile: ModelProfile) -> None:
        self._layers = len(profile.layers)
        self._state_bytes = [layer.state_bytes for layer in profile.layers]
        self._sizes: Floats = np.array(self._state_bytes, dtype=np.float64)
        self._everything = (1 << self._layers) - 1
        self._fits: dict[tuple[Held, NodeSlot], _Fit] = {}

    def masks(self, nodes: Iterable[str], devices: int, holdings: Mapping[Device, frozenset[int]]) -> Masks:
        """Return the layers that the devices of these nodes hold, by their index; a device without holdings
        holds none.
        """
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
        parts: Sequence[Sequence[SlotParts]] = (),
    ) -> Assignment:
        """Return the assignment that moves the fewest bytes and whose nodes together hold every layer; other
        nodes stay idle.

        A byte of old layers that a device has no room for counts as one that moves. Where there are such
        bytes, all nodes are solved for, as the direct assignment minimises only the bytes that move.

        :param nodes: names in natural order, at least as many as there are slots.
        :param needs: state that must be held instead of every layer of ``masks``.
        :param habits: position (pipeline, slot) in which a node was; it stays there where that moves no
            more bytes.
        :param rooms: headroom of the slots of each pipeline; empty where memory has no limit, or old layers
            take none.
        :param parts: of the slots of each pipeline; empty where no stage divides its state. The bytes of the result
            are those of the parts; nodes are chosen as if devices received whole layers.
        :raises StateLostError: no choice of nodes for the slots holds every layer.
        """
        slots = [
            ((number, offset), slot)
            for number, pipeline in enumerate(pipelines)
            for offset, slot in enumerate(pipeline)
        ]
        room_of = {
            (number, offset): room for number, of in enumerate(rooms) for offset, room in enumerate(of)
        }
        needs = needs or whole_layers(masks, self._layers)

        def fill(assigned: dict[Position, str]) -> Assignment:
            self._assign_others(assigned, slots, nodes, masks, habits, (), room_of)
            if not needs.held_by(assigned.values()):
                needed = cover(nodes, needs, len(slots))
                assigned = {}
                self._assign_others(assigned, slots, nodes, masks, habits, needed, room_of)
            return self._assignment(pipelines, assigned, masks, room_of, parts)

        found = fill(_assign_exact(slots, nodes, masks, habits))
        if found.excess_bytes:
            found = min(found, fill({}), key=lambda each: each.moved_bytes + each.excess_bytes)
        return found

    def order_inside(self, held: Held, slot: NodeSlot) -> tuple[int, ...]:
        """Return the device of a node for each range of a slot, so that the fewest bytes move."""
        return self._fit(held, slot).order

    def _fit(self, held: Held, slot: NodeSlot) -> _Fit:
        key = (held, slot)
        fit = self._fits.get(key)
        if fit is None:
            wanted = [(1 << end) - (1 << first) for first, end in slot]
            order = tuple(range(len(held)))
            if len(set(held)) > 1 and len(set(slot)) > 1:
                order = tuple(solve(self._missing(list(held), list(slot))))
            lacking = tuple(mask & ~held[index] for mask, index in zip(wanted, order, strict=True))
            fit = self._fits[key] = _Fit(order, lacking)
        return fit

    def _assign_others(
        self,
        assigned: dict[Position, str],
        slots: Sequence[tuple[Position, NodeSlot]],
        nodes: Sequence[str],
        masks: Masks,
        habits: Mapping[str, Position],
        needed: Sequence[str],
        room_of: Mapping[Position, MemoryHeadroom],
    ) -> None:
        """Add nodes without a slot to ``assigned``, for all slots that have none yet.

        :param needed: nodes that must have a slot.
        """
        busy = set(assigned.values())
        free = [node for node in nodes if node not in busy]
        open_slots = [(position, slot) for position, slot in slots if position not in assigned]
        if not open_slots:
            return
        kinds, row_kind = _numbered([masks[node] for node in free])
        wanted, column_kind = _numbered([(slot, room_of.get(position)) for position, slot in open_slots])
        # Costs are computed by kind first; copying whole rows afterwards is quick.
        cost = (self._costs(kinds, wanted) * (2 * len(slots) + 1))[:, column_kind][row_kind]
        _add_changes(cost, free, [position for position, _ in open_slots], habits)
        if needed:
            must = set(needed)
            cost[[row for row, node in enumerate(free) if node in must]] -= (
                float(cost.max(axis=0).sum()) + 1.0
            )
        for (position, _), row in zip(open_slots, solve(cost), strict=True):
            assigned[position] = free[row]

    def _missing(self, held: Sequence[int], ranges: Sequence[Range]) -> Floats:
        """Return the bytes of ``ranges`` that devices with ``held`` lack; shape (held, ranges)."""
        before = np.zeros((len(held), self._layers + 1))
        np.cumsum((1 - bits(held, self._layers)) * self._sizes, axis=1, out=before[:, 1:])
        edges = np.array(ranges)
        missing: Floats = before[:, edges[:, 1]] - before[:, edges[:, 0]]
        return missing

    def _costs(
        self, kinds: Sequence[Held], wanted: Sequence[tuple[NodeSlot, MemoryHeadroom | None]]
    ) -> Floats:
        """Return the bytes that a node of each kind must receive for each slot, plus those of old layers that
        it has no room for; shape (kinds, wanted).
        """
        masks, mask_of = _numbered([mask for held in kinds for mask in held])
        ranges, range_of = _numbered([part for slot, _ in wanted for part in slot])
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
        for kind, slot in np.argwhere(mixed):
            inside = missing[rows[kind]][:, columns[slot]]
            order = solve(inside)
            moved[kind, slot] = inside[order, range(devices)].sum()
            if wanted[slot][1] is not None:
                of_order = old[rows[kind][order], columns[slot]]
                moved[kind, slot] += np.clip(of_order - rooms[slot], 0.0, of_order).sum()
        return moved

    def _old(self, masks: Sequence[int], ranges: Sequence[Range], missing: Floats) -> Floats:
        """Return the bytes that devices hold outside of the ranges; shape (masks, ranges)."""
        edges, ends = np.array(ranges), np.concatenate(([0.0], np.cumsum(self._sizes)))
        inside = ends[edges[:, 1]] - ends[edges[:, 0]] - missing
        old: Floats = (bits(masks, self._layers) @ self._sizes)[:, None] - inside
        return old

    def _excess(self, held: Held, slot: NodeSlot, room: MemoryHeadroom) -> int:
        """Return the bytes of old layers that a node's devices have no room for in a slot."""
        excess = 0
        for (first, end), index, free in zip(slot, self._fit(held, slot).order, room, strict=True):
            old = self._bytes(held[index] & ~((1 << end) - (1 << first)))
            excess += min(max(old - free, 0), old)
        return excess

    def _bytes(self, mask: int) -> int:
        return sum(self._state_bytes[layer] for layer in layers_of(mask))

    def _assignment(
        self,
        pipelines: Sequence[Sequence[NodeSlot]],
        assigned: Mapping[Position, str],
        masks: Masks,
        room_of: Mapping[Position, MemoryHeadroom],
        parts: Sequence[Sequence[SlotParts]],
    ) -> Assignment:
        taken: list[tuple[str, ...]] = []
        pairs: dict[tuple[Held, NodeSlot, SlotParts], int] = {}
        tight: dict[tuple[Held, NodeSlot, MemoryHeadroom], int] = {}
        for number, pipeline in enumerate(pipelines):
            names = tuple(assigned[number, offset] for offset in range(len(pipeline)))
            taken.append(names)
            for offset, (node, slot) in enumerate(zip(names, pipeline, strict=True)):
                key = (masks[node], slot)
                pair = (*key, parts[number][offset] if parts else (1,) * len(slot))
                pairs[pair] = pairs.get(pair, 0) + 1
                room = room_of.get((number, offset))
                if room is not None:
                    tight[*key, room] = tight.get((*key, room), 0) + 1
        targets: dict[tuple[int, int], int] = {}
        holders: dict[int, int] = {}
        for (held, slot, divided), count in pairs.items():
            for mask, lacking, of in zip(held, self._fit(held, slot).lacking, divided, strict=True):
                holders[mask] = holders.get(mask, 0) + count
                if lacking:
                    targets[lacking, of] = targets.get((lacking, of), 0) + count
        bytes_of = {(mask, of): -(-self._bytes(mask) // of) for mask, of in targets}
        return Assignment(
            taken=tuple(taken),
            moved_bytes=sum(bytes_of[target] * count for target, count in targets.items()),
            excess_bytes=sum(self._excess(*case) * count for case, count in tight.items()),
            received_bytes=max(bytes_of.values(), default=0),
            sent_bytes=self._fullest_sender(targets, holders),
        )

    def _fullest_sender(self, targets: Mapping[tuple[int, int], int], holders: Mapping[int, int]) -> float:
        """Return the bytes sent by the device that sends most.

        :param targets: numbers of devices by the layers that they lack and the parts into which these are divided.
        :param holders: numbers of devices by the layers that they hold.
        """
        if not targets:
            return 0.0
        held = bits(list(holders), self._layers)
        copies = held.T @ np.array(list(holders.values()), dtype=np.float64)
        shares = np.array([count / of for (_, of), count in targets.items()], dtype=np.float64)
        wanted = bits([lacking for lacking, _ in targets], self._layers).T @ shares
        if (copies[wanted > 0] == 0).any():
            raise StateLostError("no device of the plan holds a layer that must move", ())
        return float((held @ (wanted * self._sizes / np.maximum(copies, 1.0))).max())


def _assign_exact(
    slots: Sequence[tuple[Position, NodeSlot]],
    nodes: Sequence[str],
    masks: Masks,
    habits: Mapping[str, Position],
) -> dict[Position, str]:
    """Return nodes for slots that need exactly what they hold: first nodes that were there, then any.

    Of the nodes with equal holdings, those without a position in this layout take others' slots first.
    """
    exactly: dict[NodeSlot, Held] = {
        slot: tuple(sorted((1 << end) - (1 << first) for first, end in slot)) for _, slot in slots
    }
    sorted_held = {held: tuple(sorted(held)) for held in set(masks.values())}
    assigned: dict[Position, str] = {}
    at_home = {position: node for node, position in habits.items() if node in masks}
    for position, slot in slots:
        node = at_home.get(position)
        if node is not None and sorted_held[masks[node]] == exactly[slot]:
            assigned[position] = node
    busy = set(assigned.values())
    waiting: dict[Held, list[str]] = {}
    for node in sorted((node for node in nodes if node not in busy), key=lambda node: node in habits):
        waiting.setdefault(sorted_held[masks[node]], []).append(node)
    for queue in waiting.values():
        queue.reverse()
    for position, slot in slots:
        queue = waiting.get(exactly[slot], [])
        if position not in assigned and queue:
            assigned[position] = queue.pop()
    return assigned


def _add_changes(
    cost: Floats, free: Sequence[str], positions: Sequence[Position], habits: Mapping[str, Position]
) -> None:
    """Add 1 where a node would leave its slot, 2 where it would leave its pipeline; shape (free, positions)."""
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
        rows, indices, saved = zip(*at, strict=True)
        cost[rows, indices] -= saved


def _numbered(items: Sequence[Kind]) -> tuple[list[Kind], NDArray[np.int64]]:
    """Return the distinct items, and for each item the index of its equal among them."""
    numbers: dict[Kind, int] = {}
    of_items = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), np.array(of_items, dtype=np.int64)


def bits(masks: Sequence[int], count: int) -> Floats:
    """Return 1 where a mask has a bit, else 0; shape (masks, count)."""
    size = -(-count // 8)
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), dtype=np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(masks), size), axis=1, count=count, bitorder="little")
    return unpacked.astype(np.float64)


def solve(cost: Floats) -> list[int]:
    """Return the row of each column with the least sum; there are no more columns than rows."""
    if (cost == cost[0, 0]).all():
        return list(range(cost.shape[1]))
    # It takes half a second to import, and processes that only precompute do not need it.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost)
    chosen = [0] * cost.shape[1]
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        chosen[column] = row
    return chosen
