"""Every mapping of a small pipeline, in arrays, and the quickest of them under 1F1B."""

from collections.abc import Iterator
from itertools import combinations
from math import comb

import numpy as np

from planner.stages.costs import Ints, StageCosts
from planner.stages.makespan import Floats, makespans, path_bounds
from planner.values import StageTemplate

CHUNK = 256
"""Mappings simulated at a time: enough to outweigh numpy's cost per call, few enough to stop early."""


def mapping_count(costs: StageCosts, nodes: int) -> int:
    """Mappings of a pipeline of ``nodes`` nodes, memory not considered."""
    ways = {0: 1}
    for _ in range(nodes):
        extended: dict[int, int] = {}
        for stages, count in ways.items():
            for more, splits in costs.split_counts.items():
                extended[stages + more] = extended.get(stages + more, 0) + count * splits
        ways = extended
    return sum(count * comb(costs.layers - 1, stages - 1) for stages, count in ways.items())


def _all_splits(costs: StageCosts, nodes: int) -> dict[int, list[tuple[int, ...]]]:
    """Devices of each stage, for all splits of all nodes, by number of stages."""
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
    """Arrays (cuts, devices) of shape (C, S + 1) and (C, S), one pair for each number of stages S."""
    for stages, splits in sorted(_all_splits(costs, nodes).items()):
        inner = np.array(list(combinations(range(1, costs.layers), stages - 1)), dtype=np.int64)
        cuts = np.zeros((len(inner), stages + 1), dtype=np.int64)
        cuts[:, 1:-1], cuts[:, -1] = inner.reshape(len(inner), stages - 1), costs.layers
        devices = np.array(splits, dtype=np.int64)
        yield np.tile(cuts, (len(devices), 1)), np.repeat(devices, len(cuts), axis=0)


def quickest_modes(costs: StageCosts, cuts: Ints, devices: Ints) -> Ints:
    """Return for each stage of mappings the number of its mode, shape (C, S); -1 where none fits into memory."""
    modes: Ints = np.zeros(devices.shape, dtype=np.int64)
    if costs.memory.limit_bytes is None:
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
    """The mapping with the least makespan among these that fit into memory, and that makespan.

    Simulated in the order of their lower bounds, until no bound is below the best makespan.

    :param below_ms: ``None`` is the answer where no makespan is below it.
    :param slowness: how many times as long as the profile says each stage takes, shape (S,).
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
