"""Under ZeRO-1 the state of a layer is in parts, with the owners of it: who together have all of it.

The parts of a layer are equal: with m owners, owner i has part i, elements [i·n/m, (i + 1)·n/m) of n, rounded
down. While a new layout has yet to commit its first step, some devices may have parts of the old one and
others of the new one. So what counts are the cells between the cuts of all of them: whoever has the part
[a, b) has the cells in it, and cells that follow each other in fractions do so in elements.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from planner.changes.cover import Masks, Needs
from planner.values import Device, ModelProfile, PipelinePlacement, StatePart

Cell = tuple[int, Fraction]
"""A layer, and where the cell of it begins."""


def part_needs(
    nodes: Iterable[str], devices: int, parts: Mapping[Device, Sequence[StatePart]], layers: int
) -> Needs:
    """The cells of all layers; those that the same devices have are one item."""
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
    return Needs(held, (1 << len(items)) - 1, tuple(tuple(sorted(of)) for of in items.values()))


def incomplete(parts: Iterable[Sequence[StatePart]], layers: int) -> list[int]:
    """Layers of which those who have these parts lack some."""
    told = list(parts)
    cuts = _cuts(told, layers)
    there = {cell for of_device in told for cell in _cells(of_device, cuts)}
    return [
        layer
        for layer, begins in enumerate(cuts)
        if any((layer, begin) not in there for begin in begins[:-1])
    ]


def moved_bytes(
    profile: ModelProfile,
    pipelines: Sequence[PipelinePlacement],
    holdings: Mapping[Device, frozenset[int]],
    parts: Mapping[Device, Sequence[StatePart]],
) -> int:
    """What the devices of a plan lack of their layers' parameters and of their parts' optimizer state."""
    lacking = Fraction(0)
    for number, pipeline in enumerate(pipelines):
        begin, end = Fraction(number, len(pipelines)), Fraction(number + 1, len(pipelines))
        for stage in pipeline.stages:
            for device in stage.devices:
                runs: dict[int, list[tuple[Fraction, Fraction]]] = {}
                for part in parts.get(device, ()):
                    run = Fraction(part.part, part.parts), Fraction(part.part + 1, part.parts)
                    runs.setdefault(part.layer, []).append(run)
                for layer in range(stage.first_layer, stage.end_layer):
                    of, has = profile.layers[layer], runs.get(layer, [])
                    lacking += of.optimizer_bytes * (end - begin - _overlap(has, begin, end))
                    if layer not in holdings.get(device, frozenset()):
                        lacking += of.parameter_bytes * (1 - _overlap(has, Fraction(0), Fraction(1)))
    return int(lacking)


def _cuts(parts: Iterable[Sequence[StatePart]], layers: int) -> list[list[Fraction]]:
    """Where the parts of each layer begin and end, ascending."""
    counts: list[set[int]] = [{1} for _ in range(layers)]
    for told in {id(of_device): of_device for of_device in parts}.values():
        for part in told:
            if part.layer < layers:
                counts[part.layer].add(part.parts)
    made: dict[frozenset[int], list[Fraction]] = {}
    cuts: list[list[Fraction]] = []
    for of_layer in counts:
        key = frozenset(of_layer)
        if key not in made:
            made[key] = sorted({Fraction(cut, parts) for parts in key for cut in range(parts + 1)})
        cuts.append(made[key])
    return cuts


def _cells(parts: Sequence[StatePart], cuts: Sequence[Sequence[Fraction]]) -> set[Cell]:
    cells: set[Cell] = set()
    for part in parts:
        if part.layer < len(cuts):
            begins, end = cuts[part.layer], Fraction(part.part + 1, part.parts)
            first = begins.index(Fraction(part.part, part.parts))
            for begin in begins[first:]:
                if begin >= end:
                    break
                cells.add((part.layer, begin))
    return cells


def _overlap(runs: Iterable[tuple[Fraction, Fraction]], begin: Fraction, end: Fraction) -> Fraction:
    """How much of [begin, end) these runs cover, each point once."""
    covered, reached = Fraction(0), begin
    for first, last in sorted(runs):
        added = min(last, end) - max(first, reached)
        if added > 0:
            covered, reached = covered + added, min(last, end)
    return covered
