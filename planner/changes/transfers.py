"""Which state must move before a plan can start: one transfer per device and layer that it lacks."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from planner.changes.cover import Masks, layers_of
from planner.values import Device, ModelProfile, PipelinePlacement, Transfer


def transfers(
    profile: ModelProfile, pipelines: Sequence[PipelinePlacement], masks: Masks
) -> tuple[Transfer, ...] | None:
    """Largest first; from a device of the same node where one holds the layer, else from the one that has
    least to send so far. Only devices with a place in the plan can send: the others are in no group.

    :returns: ``None`` where a layer that must move is held by no device of the plan.
    """
    devices: list[Device] = []
    node_of: list[int] = []
    ranks_of: list[list[int]] = []
    holding: dict[int, list[int]] = {}
    lacking: dict[int, list[int]] = {}
    numbers: dict[str, int] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            needs = (1 << stage.end_layer) - (1 << stage.first_layer)
            for device in stage.devices:
                number = numbers.setdefault(device.node, len(numbers))
                if number == len(ranks_of):
                    ranks_of.append([])
                ranks_of[number].append(len(devices))
                held = masks[device.node][device.index]
                holding.setdefault(held, []).append(len(devices))
                if needs & ~held:
                    lacking.setdefault(needs & ~held, []).append(len(devices))
                node_of.append(number)
                devices.append(device)
    wanted: dict[int, list[int]] = {}
    for missing, ranks in lacking.items():
        for layer in layers_of(missing):
            wanted.setdefault(layer, []).extend(ranks)
    sent = [0] * len(devices)
    moves: list[Transfer] = []
    for negative, layer in sorted((-profile.layers[layer].state_bytes, layer) for layer in wanted):
        holders = [rank for held, ranks in holding.items() if held >> layer & 1 for rank in ranks]
        if not holders:
            return None
        sources, near = _Sources(sent, holders), {node_of[rank] for rank in holders}
        is_holder = set(holders)
        for rank in sorted(wanted[layer]):
            number = node_of[rank]
            if number in near:
                source = min(is_holder.intersection(ranks_of[number]), key=lambda r: (sent[r], r))
            else:
                source = sources.least()
            sent[source] -= negative
            moves.append(
                Transfer(layer=layer, source=devices[source], target=devices[rank], size_bytes=-negative)
            )
    return tuple(moves)


class _Sources:
    """Holders of one layer by what they have to send so far, which only grows; ``sent`` is by rank."""

    def __init__(self, sent: Sequence[int], holders: Sequence[int]) -> None:
        self._sent = sent
        self._queue = [(sent[rank], rank) for rank in holders]
        heapify(self._queue)

    def least(self) -> int:
        """The rank that has least to send."""
        sent, rank = self._queue[0]
        while sent != self._sent[rank]:
            heapreplace(self._queue, (self._sent[rank], rank))
            sent, rank = self._queue[0]
        return rank
