"""What single layers take by the profile. Without numpy: the coordinator's event loop asks this, too."""

from collections.abc import Iterable

from planner.values import Device, LayerProfile, ModelProfile, PipelinePlacement, Policy, Recompute


def rows_on_one(devices: int, rows: int) -> int:
    """Rows of a microbatch on the fullest of a stage's devices."""
    return -(-rows // devices)


def layer_ms(
    profile: ModelProfile, policy: Policy, layer: LayerProfile, devices: int, recompute: Recompute = "none"
) -> tuple[float, float]:
    """Forward and backward of one microbatch of one layer on so many devices.

    All that recomputation takes counts as backward, and it grows with the number of devices as forward does.
    """
    measured = next((split for split in layer.split if split.devices == devices), None)
    if measured is None:
        share = rows_on_one(devices, policy.microbatch_rows) / policy.microbatch_rows
        forward_ms, backward_ms = layer.forward_ms * share, layer.backward_ms * share
    else:
        forward_ms, backward_ms = measured.forward_ms, measured.backward_ms
    again = layer.selective if recompute == "selective" else layer.full
    if recompute != "none" and again is not None:
        backward_ms += again.recompute_ms * (forward_ms / layer.forward_ms if layer.forward_ms else 1.0)
    elif recompute != "none":
        assert recompute == "full", "the costs refuse a profile without selective recomputation"
        backward_ms += forward_ms
    scale = policy.microbatch_rows / profile.microbatch_rows
    return forward_ms * scale, backward_ms * scale


def expected_ms(
    profile: ModelProfile, policy: Policy, placements: Iterable[PipelinePlacement]
) -> dict[Device, float]:
    """How long each device computes on one microbatch, forward and backward, if all nodes have speed 1."""
    expected: dict[Device, float] = {}
    for placement in placements:
        for stage in placement.stages:
            layers = profile.layers[stage.first_layer : stage.end_layer]
            takes_ms = sum(
                sum(layer_ms(profile, policy, layer, len(stage.devices), stage.recompute)) for layer in layers
            )
            expected.update(dict.fromkeys(stage.devices, takes_ms))
    return expected
