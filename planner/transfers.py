"""Which state must move before a plan can start: one transfer per device and layer that it lacks."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from planner.assignment import Masks
from planner.cover import layers_of
from planner.values import Device, ModelProfile, PipelinePlacement, Transfer


def transfers(
    profile: ModelProfile, pipelines: Sequence[PipelinePlacement], masks: Masks
) -> tuple[Transfer, ...] | None:
    """Largest first; from a device of the same node where one holds the layer, else from the one that has
    least to send so far. Only devices with a place in the plan can send: the others are in no group.

    :returns: ``None`` where a layer that must move is held by no device of the plan.
    """
    devices: list[Device] = []
    of_node: dict[str, list[int]] = {}
    holding: dict[int, list[int]] = {}
    wanted: dict[int, list[int]] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            needs = (1 << stage.end_layer) - (1 << stage.first_layer)
            for device in stage.devices:
                rank = len(devices)
                devices.append(device)
                held = masks[device.node][device.index]
                of_node.setdefault(device.node, []).append(rank)
                holding.setdefault(held, []).append(rank)
                if needs & ~held:
                    for layer in layers_of(needs & ~held):
                        wanted.setdefault(layer, []).append(rank)
    sent = [0] * len(devices)
    moves: list[Transfer] = []
    for size_bytes, layer in sorted((-profile.layers[layer].state_bytes, layer) for layer in wanted):
        holders = [rank for held, ranks in holding.items() if held >> layer & 1 for rank in ranks]
        if not holders:
            return None
        sources = _Sources(sent, holders)
        is_holder = set(holders)
        for rank in wanted[layer]:
            target = devices[rank]
            near = [other for other in of_node[target.node] if other in is_holder]
            source = min(near, key=lambda other: (sent[other], other)) if near else sources.least()
            sent[source] -= size_bytes
            moves.append(Transfer(layer=layer, source=devices[source], target=target, size_bytes=-size_bytes))
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
