"""Search for the quickest mapping under 1F1B: among all mappings of a small pipeline, in a list, or by local
search.

The local search (``descend``) takes the best of all small moves until no move makes the step shorter.
"""

from collections.abc import Iterator
from itertools import combinations
from math import comb

import numpy as np

from planner.stages.costs import StageCosts
from planner.stages.makespan import Floats, Ints, makespans, path_bounds
from planner.values import StageTemplate

CHUNK = 256
"""Number of mappings simulated at a time: enough to outweigh numpy's cost per call, few enough to stop early."""


def mapping_count(costs: StageCosts, nodes: int) -> int:
    """Return the number of mappings of a pipeline of ``nodes`` nodes, without regard to memory."""
    ways = {0: 1}
    for _ in range(nodes):
        extended: dict[int, int] = {}
        for stages, count in ways.items():
            for more, splits in costs.split_counts.items():
                extended[stages + more] = extended.get(stages + more, 0) + count * splits
        ways = extended
    return sum(count * comb(costs.layers - 1, stages - 1) for stages, count in ways.items())


def _all_splits(costs: StageCosts, nodes: int) -> dict[int, list[tuple[int, ...]]]:
    """Return the devices of each stage, for all splits of all nodes, by number of stages."""
    splits, fewest = costs.node_splits, costs.fewest_stages
    whole: list[tuple[int, ...]] = [()]
    for node in range(nodes):
        most = costs.layers - fewest * (nodes - 1 - node)
        whole = [front + split for front in whole for split in splits if len(front) + len(split) <= most]
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for devices in whole:
        grouped.setdefault(len(devices), []).append(devices)
    return grouped


def all_mappings(costs: StageCosts, nodes: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield arrays (cuts, devices) of shapes (C, S + 1) and (C, S), one pair for each number of stages S."""
    for stages, splits in sorted(_all_splits(costs, nodes).items()):
        inner = np.array(list(combinations(range(1, costs.layers), stages - 1)), dtype=np.int64)
        cuts = np.zeros((len(inner), stages + 1), dtype=np.int64)
        cuts[:, 1:-1], cuts[:, -1] = inner.reshape(len(inner), stages - 1), costs.layers
        devices = np.array(splits, dtype=np.int64)
        yield np.tile(cuts, (len(devices), 1)), np.repeat(devices, len(cuts), axis=0)


def quickest_modes(costs: StageCosts, cuts: Ints, devices: Ints) -> Ints:
    """Return for each stage of mappings the number of its mode, shape (C, S); -1 where none fits into memory."""
    modes: Ints = np.zeros(devices.shape, dtype=np.int64)
    if costs.memory.limit_bytes is None and len(costs.modes) == 1:
        return modes
    stages = devices.shape[1]
    for stage in range(stages):
        begins, ends, here = cuts[:, stage], cuts[:, stage + 1], devices[:, stage]
        for d in costs.stage_devices:
            table = costs.quickest_modes(d, stages - 1 - stage)
            np.copyto(modes[:, stage], table[begins, ends], where=here == d)
    return modes


def quickest(
    costs: StageCosts,
    cuts: Ints,
    devices: Ints,
    microbatches: int,
    *,
    slowness: Floats | None = None,
    below_ms: float = np.inf,
) -> tuple[float, tuple[StageTemplate, ...]] | None:
    """Return the least makespan of those mappings that fit into memory, and a mapping that has it.

    Mappings are simulated in the order of their lower bounds, until no bound is below the best makespan.

    :param below_ms: limit below which a makespan must be; the result is ``None`` if there is none.
    :param slowness: factor by which each stage takes longer than the profile says, shape (S,).
    """
    modes = quickest_modes(costs, cuts, devices)
    kept = (modes >= 0).all(axis=1)
    cuts, devices, modes = cuts[kept], devices[kept], modes[kept]
    if not len(cuts):
        return None
    forward_ms = costs.forward_ms[modes, devices, cuts[:, :-1], cuts[:, 1:]]
    backward_ms = costs.backward_ms[modes, devices, cuts[:, :-1], cuts[:, 1:]]
    if slowness is not None:
        forward_ms, backward_ms = forward_ms * slowness, backward_ms * slowness
    link_ms: Floats = costs.link_ms[cuts[:, 1:-1]]
    bounds = path_bounds(forward_ms, backward_ms, link_ms, microbatches)
    order = np.argsort(bounds, kind="stable")
    best_ms, best = below_ms, -1
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        if bounds[chunk[0]] >= best_ms:
            break
        spans = makespans(forward_ms[chunk], backward_ms[chunk], link_ms[chunk], microbatches)
        least = int(spans.argmin())
        if spans[least] < best_ms:
            best_ms, best = float(spans[least]), int(chunk[least])
    if best < 0:
        return None
    return best_ms, costs.stages(cuts[best].tolist(), devices[best].tolist())


LONGEST_SHIFT = 8
"""Most neighbouring cuts that move together in one step."""
NEAR = 2
"""Most layers by which a cut moves when devices move from one of its stages to the other."""
MOST_STEPS = 100

Row = tuple[list[int], list[int]]
"""Cuts, from 0 to L, and the devices of the stages between them."""


def descend(
    costs: StageCosts,
    stages: tuple[StageTemplate, ...],
    makespan_ms: float,
    microbatches: int,
    floor_ms: float,
) -> tuple[float, tuple[StageTemplate, ...]]:
    """Return the makespan of a mapping that no move makes quicker, and the mapping.

    :param makespan_ms: makespan of ``stages``.
    :param floor_ms: a lower bound on all makespans; the search ends when it is reached.
    """
    for _ in range(MOST_STEPS):
        found = quickest_of(costs, list(_neighbours(stages, costs)), microbatches, makespan_ms)
        if found is None or makespan_ms <= floor_ms:
            break
        makespan_ms, stages = found
    return makespan_ms, stages


def quickest_of(
    costs: StageCosts, rows: list[Row], microbatches: int, below_ms: float
) -> tuple[float, tuple[StageTemplate, ...]] | None:
    """Return the quickest of mappings with any numbers of stages, ``None`` if none takes less than
    ``below_ms``.
    """
    by_depth: dict[int, list[Row]] = {}
    for row in rows:
        by_depth.setdefault(len(row[1]), []).append(row)
    best = None
    for _, group in sorted(by_depth.items()):
        cuts: Ints = np.array([cuts for cuts, _ in group], dtype=np.int64)
        devices: Ints = np.array([devices for _, devices in group], dtype=np.int64)
        found = quickest(costs, cuts, devices, microbatches, below_ms=below_ms)
        if found is not None:
            best, below_ms = found, found[0]
    return best


def as_row(stages: tuple[StageTemplate, ...]) -> Row:
    return [0, *(stage.end_layer for stage in stages)], [stage.devices for stage in stages]


def shifted(cuts: list[int]) -> Iterator[list[int]]:
    """Yield the cuts in which several neighbouring cuts move up or down by one layer, or one cut by more."""
    stages = len(cuts) - 1
    for first in range(1, stages):
        for after in range(first + 1, min(first + LONGEST_SHIFT, stages) + 1):
            for step in (-1, 1):
                moved = [*cuts[:first], *(cut + step for cut in cuts[first:after]), *cuts[after:]]
                if moved[first] > moved[first - 1] and moved[after] > moved[after - 1]:
                    yield moved
        for cut in range(cuts[first - 1] + 1, cuts[first + 1]):
            if abs(cut - cuts[first]) > 1:
                yield [*cuts[:first], cut, *cuts[first + 1 :]]


def _neighbours(stages: tuple[StageTemplate, ...], costs: StageCosts) -> Iterator[Row]:
    """Yield the mappings that are one move away."""
    cuts, devices = as_row(stages)
    positions = [sum(devices[:index]) % costs.devices_per_node for index in range(len(devices))]
    for moved in shifted(cuts):
        yield moved, devices
    for index, stage in enumerate(stages):
        for left, right in _halves(costs, stage.devices, positions[index]):
            split = [*devices[:index], left, right, *devices[index + 1 :]]
            for cut in range(stage.first_layer + 1, stage.end_layer):
                yield [*cuts[: index + 1], cut, *cuts[index + 1 :]], split
    for index in range(1, len(stages)):
        if stages[index - 1].node_offset != stages[index].node_offset:
            continue
        together, before = devices[index - 1] + devices[index], positions[index - 1]
        if together in costs.stage_devices and costs.can_start(before, together):
            yield (
                [*cuts[:index], *cuts[index + 1 :]],
                [*devices[: index - 1], together, *devices[index + 1 :]],
            )
        for left, right in _halves(costs, together, before):
            if left != devices[index - 1]:
                changed = [*devices[: index - 1], left, right, *devices[index + 1 :]]
                nearest = max(cuts[index - 1] + 1, cuts[index] - NEAR)
                for cut in range(nearest, min(cuts[index + 1], cuts[index] + NEAR + 1)):
                    yield [*cuts[:index], cut, *cuts[index + 1 :]], changed
    yield from ((cuts, swapped) for swapped in _swapped(devices, costs.devices_per_node))


def _halves(costs: StageCosts, devices: int, position: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes of two stages in the place of ``devices`` devices from ``position`` on in their node."""
    for left in costs.stage_devices:
        right = devices - left
        known = right in costs.stage_devices
        if known and costs.can_start(position, left) and costs.can_start(position + left, right):
            yield left, right


def _swapped(devices: list[int], devices_per_node: int) -> Iterator[list[int]]:
    """Yield the devices with two neighbouring nodes exchanged, where the nodes are split differently."""
    nodes: list[list[int]] = [[]]
    for d in devices:
        if sum(nodes[-1]) == devices_per_node:
            nodes.append([])
        nodes[-1].append(d)
    for index in range(1, len(nodes)):
        if nodes[index - 1] != nodes[index]:
            order = [*nodes[: index - 1], nodes[index], nodes[index - 1], *nodes[index + 1 :]]
            yield [d for node in order for d in node]
