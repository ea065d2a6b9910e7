"""Whether stages fit into memory: on how few nodes, and which stage is too large where they do not.

Times do not matter here, only bytes and the number of stages after each stage (``memory``).
"""

from dataclasses import dataclass

import numpy as np

from planner.stages.costs import StageCosts
from planner.stages.makespan import Ints
from planner.stages.memory import Sizes
from planner.values import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestStage:
    """The stage that needs most memory, in a mapping that needs as little as possible."""

    first_layer: int
    end_layer: int
    stages_after: int
    devices: int
    size_bytes: int
    mode: Mode


def sizes_allowed(costs: StageCosts) -> list[int]:
    """Return how many of ``stage_devices`` are possible for the first stage of a pipeline's last g devices.

    The index is g modulo the devices of a node. Smaller stages can start wherever larger ones can, so the
    sizes allowed are the first ones.
    """
    return [len(costs.sizes_before(g)) for g in range(costs.devices_per_node)]


def memory_ends(costs: StageCosts, nodes: int) -> Ints:
    """Return the last end of a stage from layer u that fits, ``u`` if none fits, for pipelines of up to
    ``nodes`` nodes.

    The shape is (rows, sizes of a stage, modes, L + 1). Row r is for r stages after it, the last row for
    that many or more; there are only as many rows as differ.
    """
    starts = np.arange(costs.layers + 1)
    sizes, modes = costs.stage_devices, range(len(costs.modes))
    if costs.memory.limit_bytes is None:
        return np.full((1, len(sizes), len(modes), costs.layers + 1), costs.layers, dtype=np.int64)
    longer = starts[None, :] > starts[:, None]
    depths = min(nodes * costs.devices_per_node, costs.layers, costs.policy.microbatches)
    ends: Ints = np.array(
        [
            # A longer stage needs no less memory, so the ends that fit are consecutive.
            [
                [starts + (costs.mode_fits(mode, d, depth) & longer).sum(axis=1) for mode in modes]
                for d in sizes
            ]
            for depth in range(depths)
        ]
    )
    changes = (ends[1:] != ends[:-1]).any(axis=(1, 2, 3)).nonzero()[0]
    return ends[: int(changes[-1]) + 2 if len(changes) else 1]


def fewest_nodes(costs: StageCosts) -> int | None:
    """Return the nodes of the smallest pipeline that fits into memory, ``None`` if not even the largest does."""
    if costs.memory.limit_bytes is None or not costs.most_nodes:
        return 1 if costs.most_nodes else None
    ends = memory_ends(costs, costs.most_nodes).max(axis=2)
    rows, starts = np.arange(len(ends))[:, None], np.arange(costs.layers + 1)
    if (ends[0, :, :-1].max(axis=0) == starts[:-1]).any():
        return None  # Some layer fits nowhere.
    allowed = sizes_allowed(costs)
    nothing = np.zeros((len(ends), costs.layers + 1), dtype=np.bool_)
    nothing[0, -1] = True
    reached: dict[int, Ints] = {0: nothing.cumsum(axis=1)}
    for g in range(1, costs.most_nodes * costs.devices_per_node + 1):
        # This says where layers [u, L) fit on the last g devices. In prefix sums, a window has a place if
        # its ends differ.
        here = np.zeros_like(nothing)
        for index, d in enumerate(costs.stage_devices[: allowed[g % len(allowed)]]):
            sums = reached[g - d]
            found = sums[rows, ends[:, index]] > sums[rows, starts]
            here[1:] |= found[:-1]
            here[-1] |= found[-1]
        if g % costs.devices_per_node == 0 and here[:, 0].any():
            return g // costs.devices_per_node
        reached[g] = here.cumsum(axis=1)
        reached.pop(g - costs.max_devices, None)
    return None


def find_fullest_stage(costs: StageCosts, nodes: int) -> FullestStage:
    """Return the fullest stage of the cut whose fullest stage needs fewest bytes, over all numbers of stages
    on ``nodes`` nodes.

    Stages are spread evenly over the nodes: each has as many devices as the node with most stages allows.
    """
    most = min(costs.layers, nodes * max(costs.split_counts))
    by_devices: dict[int, list[int]] = {}
    for stages in range(nodes * costs.fewest_stages, most + 1):
        share = costs.devices_per_node // -(-stages // nodes)
        devices = max((d for d in costs.stage_devices if d <= share), default=costs.stage_devices[0])
        by_devices.setdefault(devices, []).append(stages)
    cuts = [cut for devices, counts in by_devices.items() for cut in _emptiest(costs, devices, counts)]
    return min(cuts, key=lambda cut: cut.size_bytes)


def _emptiest(costs: StageCosts, devices: int, counts: list[int]) -> list[FullestStage]:
    """Return the fullest stage of the best cut into each number of stages, where each has ``devices`` devices."""
    never = np.iinfo(np.int64).max
    starts = np.arange(costs.layers + 1)
    longer = starts[None, :] > starts[:, None]
    fullest: Sizes = np.where(starts == costs.layers, 0, never)
    choices: list[Ints] = []
    found: list[FullestStage] = []
    for after in range(max(counts)):
        modes = [costs.modes[number] for number in costs.modes_of(devices)]
        least = np.min([costs.memory.table(devices, after, mode) for mode in modes], axis=0)
        table = np.where(longer, least, never)
        both = np.maximum(table, fullest[None, :])
        choices.append(both.argmin(axis=1))
        fullest = both.min(axis=1)
        if after + 1 in counts:
            found.append(_follow(costs, devices, choices))
    return found


def _follow(costs: StageCosts, devices: int, choices: list[Ints]) -> FullestStage:
    """Return the fullest of the stages that begin at layer 0 and end at ``choices[stages after][u]``."""
    stages: list[FullestStage] = []
    first = 0
    for after in reversed(range(len(choices))):
        end = int(choices[after][first])
        least = [
            (costs.memory.stage_bytes(first, end, devices, after, costs.modes[number]), number)
            for number in costs.modes_of(devices)
        ]
        size, number = min(least)
        stages.append(
            FullestStage(
                first_layer=first,
                end_layer=end,
                stages_after=after,
                devices=devices,
                size_bytes=size,
                mode=costs.modes[number].of(devices),
            )
        )
        first = end
    return max(stages, key=lambda stage: stage.size_bytes)
