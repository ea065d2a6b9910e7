"""Times and sizes of single layers by the profile.

This module does without numpy, because the coordinator's event loop uses it, too.
"""

from collections.abc import Iterable

from planner.values import Device, LayerProfile, ModelProfile, PipelinePlacement, Policy, Recompute


def rows_on_one(devices: int, rows: int) -> int:
    """Return the rows of a microbatch on the fullest of a stage's devices."""
    return -(-rows // devices)


def layer_ms(
    profile: ModelProfile, policy: Policy, layer: LayerProfile, devices: int, recompute: Recompute = "none"
) -> tuple[float, float]:
    """Return forward and backward time of one microbatch of one layer on ``devices`` devices.

    All time of recomputation counts as backward, and it scales with the number of devices as forward does.
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
        assert recompute == "full", "the costs reject a profile without selective recomputation"
        backward_ms += forward_ms
    scale = policy.microbatch_rows / profile.microbatch_rows
    return forward_ms * scale, backward_ms * scale


def divided_bytes(layer: LayerProfile) -> int:
    """Return the bytes of the layer's parameters, which shards divide; buffers are whole on each device."""
    return max(layer.parameter_bytes - layer.buffer_bytes, 0)


def explain_no_tensor_split(profile: ModelProfile, devices: int = 1) -> str | None:
    """Return why ``devices`` devices cannot compute parts of this model's layers, or ``None`` if they can."""
    if profile.shard_problem is not None:
        return profile.shard_problem
    if profile.tensor_problem is not None:
        return profile.tensor_problem
    if all(layer.tensor is None for layer in profile.layers):
        return "the profile was measured without a tensor-parallel plan"
    for words, count in profile.tensor_counts:
        if count % devices:
            return f"{words} is {count}, which {devices} devices do not divide"
    return None


def tensor_ms(
    profile: ModelProfile,
    policy: Policy,
    layer: LayerProfile,
    devices: int,
    recompute: Recompute = "none",
    replicas: int = 1,
) -> tuple[float, float]:
    """Return forward and backward time of one microbatch of one layer that ``devices`` devices of each of
    ``replicas`` replicas compute in parts. Their communication is included; its time is computed and not
    measured.

    Each device takes all rows of its replica. A layer with divided modules is assumed to need 1 /
    ``devices`` of its time; other layers need all of it on each device. An all-reduce is two times
    ``devices`` − 1 hops of a ring. Parameters that are not divided are gathered in both passes. The weights
    of rowwise modules are copied, and their gradients returned, once for a step; each of its microbatches is
    charged an equal part.
    """
    forward_ms, backward_ms = layer_ms(profile, policy, layer, replicas, recompute)
    if devices == 1:
        return forward_ms, backward_ms
    inner, hops, split = profile.inner or profile.ring, devices - 1, layer.tensor
    scale = rows_on_one(replicas, policy.microbatch_rows) / profile.microbatch_rows
    whole_bytes = divided_bytes(layer) - (0 if split is None else split.parameter_bytes)
    gather_ms = hops * inner.time_ms(whole_bytes / devices) if whole_bytes > 0 else 0.0
    if split is None:
        return forward_ms + gather_ms, backward_ms + gather_ms

    def exchange_ms(size_bytes: int, times: int) -> float:
        return 2 * hops * times * inner.time_ms(size_bytes * scale / devices / times) if times else 0.0

    there_ms = exchange_ms(split.forward_bytes, split.forward_exchanges)
    back_ms = exchange_ms(split.backward_bytes, split.backward_exchanges)
    back_ms += there_ms if recompute != "none" else 0.0
    if split.column_bytes:
        once_ms = hops * inner.time_ms(split.column_bytes / devices) / max(policy.microbatches, 1)
        there_ms, back_ms = there_ms + once_ms, back_ms + once_ms
    return forward_ms / devices + gather_ms + there_ms, backward_ms / devices + gather_ms + back_ms


def shard_ms(profile: ModelProfile, layer: LayerProfile, devices: int) -> tuple[float, float]:
    """Return how much longer forward and backward of one microbatch of one layer take on shards than on
    replicas.

    Each pass gathers the layer's parameters, and the backward pass reduces and scatters the gradients of those
    that are trained: each time ``devices`` − 1 hops of a ring, with one device's share of the bytes.
    Recomputation needs no more: it gathers what the backward pass of the layer needs anyway. Computation is
    assumed to hide none of the gathering. The times are computed, not measured.
    """
    inner = profile.inner or profile.ring

    def ring_ms(size_bytes: int) -> float:
        return (devices - 1) * inner.time_ms(size_bytes / devices) if size_bytes else 0.0

    gather_ms = ring_ms(divided_bytes(layer))
    return gather_ms, gather_ms + ring_ms(layer.gradient_bytes)


def expected_ms(
    profile: ModelProfile, policy: Policy, placements: Iterable[PipelinePlacement]
) -> dict[Device, float]:
    """Return how long each device computes on one microbatch, forward and backward, if all nodes have speed 1.

    Time in which shards gather and reduce, or tensor parallelism exchanges, is communication and does not
    count.
    """
    expected: dict[Device, float] = {}
    for placement in placements:
        for stage in placement.stages:
            layers = profile.layers[stage.first_layer : stage.end_layer]
            tensor = stage.within == "tensor"
            count = stage.replicas if tensor else len(stage.devices)
            takes_ms = sum(
                sum(layer_ms(profile, policy, layer, count, stage.recompute))
                / (stage.parts if tensor and layer.tensor else 1)
                for layer in layers
            )
            expected.update(dict.fromkeys(stage.devices, takes_ms))
    return expected
