"""State of a layer that is divided into ranges among devices, which have all of it together.

A range [a, b) of fractions is elements [a·n, b·n) of each vector of n, rounded down; under ZeRO-1 owner i
of m has [i/m, (i + 1)/m). The pipelines of one job may be cut differently, and until a new layout has
committed its first step, some devices have ranges of the old layout and others of the new one. Therefore
the unit is the cell between neighbouring cuts of all of them: a device with the range [a, b) has the cells
in it, and cells that follow each other in fractions do so in elements.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from planner.changes.cover import Masks, StateNeeds
from planner.values import Device, ModelProfile, PipelinePlacement, StagePlacement, StatePart

FractionRange = tuple[Fraction, Fraction]
"""Range of fractions."""
Cell = tuple[int, Fraction]
"""Layer, and the fraction at which the cell begins."""


def part_needs(
    nodes: Iterable[str], devices: int, parts: Mapping[Device, Sequence[StatePart]], layers: int
) -> StateNeeds:
    """Return the cells of all layers as items; cells that the same devices have are one item."""
    numbers = {Device(node=node, index=index): 0 for node in nodes for index in range(devices)}
    cuts = _cuts(parts.values(), layers)
    holders: dict[Cell, list[Device]] = {
        (layer, begin): [] for layer, begins in enumerate(cuts) for begin in begins[:-1]
    }
    for device in numbers:
        for cell in _cells(parts.get(device, ()), cuts):
            holders[cell].append(device)
    items: dict[tuple[Device, ...], set[int]] = {}
    for (layer, _), having in holders.items():
        items.setdefault(tuple(having), set()).add(layer)
    for bit, those in enumerate(items):
        for device in those:
            numbers[device] |= 1 << bit
    held: Masks = {}
    for device, mask in numbers.items():
        held[device.node] = (*held.get(device.node, ()), mask)
    return StateNeeds(held, (1 << len(items)) - 1, tuple(tuple(sorted(of)) for of in items.values()))


def incomplete(parts: Iterable[Sequence[StatePart]], layers: int) -> list[int]:
    """Return the layers that these parts do not cover completely."""
    listed = list(parts)
    cuts = _cuts(listed, layers)
    there = {cell for of_device in listed for cell in _cells(of_device, cuts)}
    return [
        layer
        for layer, begins in enumerate(cuts)
        if any((layer, begin) not in there for begin in begins[:-1])
    ]


def share_of(stage: StagePlacement, device: Device) -> FractionRange:
    """Return the range that a device of the stage has of the stage's layers."""
    index = stage.devices.index(device) % stage.parts
    return Fraction(index, stage.parts), Fraction(index + 1, stage.parts)


def retained_parts(
    stages: Sequence[StagePlacement], number: int, device: Device, *, zero1: bool, replica: bool = False
) -> list[FractionRange]:
    """Return the ranges of a layer of which a device keeps the optimizer state, ascending.

    :param stages: the stages that have the layer, one in each pipeline; ``number``: the index of the
        device's stage.
    :param replica: (AOR) return the next owner's ranges instead, as the first device keeps them that has
        them.
    """
    start, end = share_of(stages[number], device)
    if not zero1:
        return [(start, end)]
    counts = {stage.parts for stage in stages}
    cuts = sorted({Fraction(cut, count) for count in counts for cut in range(count + 1)})
    whose = (number + replica) % len(stages)
    return [
        (low + (high - low) * whose / len(stages), low + (high - low) * (whose + 1) / len(stages))
        for low, high in pairwise(cuts)
        if start <= low and high <= end
    ]


def moved_bytes(
    profile: ModelProfile,
    pipelines: Sequence[PipelinePlacement],
    holdings: Mapping[Device, frozenset[int]],
    parts: Mapping[Device, Sequence[StatePart]],
    *,
    zero1: bool,
) -> int:
    """Return the bytes that the devices of a plan lack of their layers' parameters and of their parts'
    optimizer state.
    """
    lacking = Fraction(0)
    stages_of = stages_by_layer(pipelines, len(profile.layers))
    for number, pipeline in enumerate(pipelines):
        for stage in pipeline.stages:
            for device in stage.devices:
                ranges = ranges_by_layer(parts.get(device, ()))
                begin, end = share_of(stage, device)
                for layer in range(stage.first_layer, stage.end_layer):
                    of, has = profile.layers[layer], ranges.get(layer, [])
                    for low, high in retained_parts(stages_of[layer], number, device, zero1=zero1):
                        lacking += of.optimizer_bytes * (high - low - _overlap(has, low, high))
                    if layer not in holdings.get(device, frozenset()):
                        lacking += of.parameter_bytes * (end - begin - _overlap(has, begin, end))
    return int(lacking)


def ranges_by_layer(parts: Iterable[StatePart]) -> dict[int, list[FractionRange]]:
    """Return the ranges of each layer that these parts are of."""
    ranges: dict[int, list[FractionRange]] = {}
    for part in parts:
        held = Fraction(part.start, part.of), Fraction(part.end, part.of)
        ranges.setdefault(part.layer, []).append(held)
    return ranges


def stages_by_layer(pipelines: Sequence[PipelinePlacement], layers: int) -> list[list[StagePlacement]]:
    """Return for each layer the stages that have it, in the order of the pipelines."""
    found: list[list[StagePlacement]] = [[] for _ in range(layers)]
    for pipeline in pipelines:
        for stage in pipeline.stages:
            for layer in range(stage.first_layer, stage.end_layer):
                found[layer].append(stage)
    return found


def _cuts(parts: Iterable[Sequence[StatePart]], layers: int) -> list[list[Fraction]]:
    """Return where the parts of each layer begin and end, ascending: from 0 to 1 at least."""
    bounds: list[set[tuple[int, int]]] = [{(0, 1), (1, 1)} for _ in range(layers)]
    for listed in {id(of_device): of_device for of_device in parts}.values():
        for part in listed:
            if part.layer < layers:
                bounds[part.layer] |= {(part.start, part.of), (part.end, part.of)}
    made: dict[frozenset[tuple[int, int]], list[Fraction]] = {}
    cuts: list[list[Fraction]] = []
    for of_layer in bounds:
        key = frozenset(of_layer)
        if key not in made:
            made[key] = sorted({Fraction(cut, of) for cut, of in key})
        cuts.append(made[key])
    return cuts


def _cells(parts: Sequence[StatePart], cuts: Sequence[Sequence[Fraction]]) -> set[Cell]:
    cells: set[Cell] = set()
    for part in parts:
        if part.layer < len(cuts):
            begins = cuts[part.layer]
            first = bisect_left(begins, Fraction(part.start, part.of))
            behind = bisect_left(begins, Fraction(part.end, part.of))
            cells.update((part.layer, begin) for begin in begins[first:behind])
    return cells


def _overlap(ranges: Iterable[FractionRange], begin: Fraction, end: Fraction) -> Fraction:
    """Return how much of [begin, end) these ranges cover; each point counts once."""
    covered, reached = Fraction(0), begin
    for first, last in sorted(ranges):
        added = min(last, end) - max(first, reached)
        if added > 0:
            covered, reached = covered + added, min(last, end)
    return covered
