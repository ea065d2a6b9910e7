"""Which state must move before a plan can start: one transfer per device and layer that it lacks."""

from collections.abc import Sequence

from planner.assignment import Masks
from planner.values import Device, ModelProfile, PipelinePlacement, Transfer


def transfers(
    profile: ModelProfile, pipelines: Sequence[PipelinePlacement], masks: Masks
) -> tuple[Transfer, ...] | None:
    """Largest first; from a device of the same node where one holds the layer, else from the one that has
    least to send so far. Only devices with a place in the plan can send: the others are in no group.

    :returns: ``None`` where a layer that must move is held by no device of the plan.
    """
    wanted: list[tuple[int, int, Device]] = []
    devices = [(d, stage) for p in pipelines for stage in p.stages for d in stage.devices]
    for device, stage in devices:
        held = masks[device.node][device.index]
        for layer in range(stage.first_layer, stage.end_layer):
            if not held >> layer & 1:
                wanted.append((-profile.layers[layer].state_bytes, layer, device))
    if not wanted:
        return ()
    wanted.sort()
    holders = {
        layer: [device for device, _ in devices if masks[device.node][device.index] >> layer & 1]
        for layer in {layer for _, layer, _ in wanted}
    }
    sending = {device: 0 for device, _ in devices}
    moves: list[Transfer] = []
    for negative_bytes, layer, target in wanted:
        sources = holders[layer]
        if not sources:
            return None
        near = [source for source in sources if source.node == target.node]
        source = min(near or sources, key=lambda device: (sending[device], device))
        sending[source] -= negative_bytes
        moves.append(Transfer(layer=layer, source=source, target=target, size_bytes=-negative_bytes))
    return tuple(moves)
