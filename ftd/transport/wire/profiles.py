"""Checks of a profile that a trainer measured, before it is used for planning, with the limits of a profile
file.

Types admit values that no clock and no model has: NaN, infinity, a negative size. For some of them the
planner would find no plan, for others a wrong one; so they are rejected here, by name.
"""

from collections.abc import Iterator
from dataclasses import fields

from ftd.config.profile_document import (
    MAX_BYTES,
    MAX_BYTES_PER_S,
    MAX_COUNT,
    MAX_DEVICES,
    MAX_FLOPS,
    MAX_LAYERS,
    MAX_MS,
)
from planner.values import LayerProfile, Link, ModelProfile, TensorSplit

Number = int | float
Bounded = tuple[str, Number, Number, Number]
"""A field's name and value, and its least and greatest possible value."""

_TIMES = ("forward_ms", "backward_ms")
_SIZES = (
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "output_bytes",
    "working_bytes",
)


def problem_of_profile(profile: ModelProfile) -> str | None:
    """Return the first impossible field, by name, with its value and its range, or ``None`` if all fields are
    possible.

    ``layers[3].forward_ms is nan, where 0 to 1e+09 is possible``
    """
    for name, value, least, most in _numbers(profile):
        if not least <= value <= most:
            return f"{name} is {value!r}; it must be {least:g} to {most:g}"
    counts = profile.stage_devices
    if counts is not None and list(counts) != sorted(set(counts)):
        return f"stage_devices is {list(counts)[:20]}, which is not ascending"
    return None


def _numbers(profile: ModelProfile) -> Iterator[Bounded]:
    yield "the number of layers", len(profile.layers), 1, MAX_LAYERS
    yield "microbatch_rows", profile.microbatch_rows, 1, MAX_COUNT
    if profile.device_memory_bytes is not None:
        yield "device_memory_bytes", profile.device_memory_bytes, 1, MAX_BYTES
    for name in ("flops", "device_peak_flops"):
        if (value := getattr(profile, name)) is not None:
            yield name, value, 1, MAX_FLOPS
    if profile.stage_devices is not None:
        yield "the number of stage_devices", len(profile.stage_devices), 1, MAX_DEVICES
        for devices in profile.stage_devices:
            yield "stage_devices", devices, 1, MAX_DEVICES
    yield from _of_link("link", profile.link)
    yield from _of_link("ring", profile.ring)
    if profile.inner is not None:
        yield from _of_link("inner", profile.inner)
    for number, (_, count) in enumerate(profile.tensor_counts):
        yield f"tensor_counts[{number}]", count, 1, MAX_COUNT
    for number, layer in enumerate(profile.layers):
        yield from _of_layer(f"layers[{number}]", layer)


def _of_link(where: str, link: Link) -> Iterator[Bounded]:
    yield f"{where}.latency_ms", link.latency_ms, 0, MAX_MS
    yield f"{where}.bytes_per_s", link.bytes_per_s, 1, MAX_BYTES_PER_S


def _of_layer(where: str, layer: LayerProfile) -> Iterator[Bounded]:
    for name in _TIMES:
        yield f"{where}.{name}", getattr(layer, name), 0, MAX_MS
    for name in _SIZES:
        yield f"{where}.{name}", getattr(layer, name), 0, MAX_BYTES
    for name, again in (("full", layer.full), ("selective", layer.selective)):
        if again is not None:
            yield f"{where}.{name}.activation_bytes", again.activation_bytes, 0, MAX_BYTES
            yield f"{where}.{name}.recompute_ms", again.recompute_ms, 0, MAX_MS
    for field in fields(TensorSplit) if layer.tensor is not None else ():
        most = MAX_LAYERS if field.name.endswith("_exchanges") else MAX_BYTES
        yield f"{where}.tensor.{field.name}", getattr(layer.tensor, field.name), 0, most
    for place, split in enumerate(layer.split):
        if split.activation_bytes is not None:
            yield f"{where}.split[{place}].activation_bytes", split.activation_bytes, 0, MAX_BYTES
        yield f"{where}.split[{place}].devices", split.devices, 2, MAX_DEVICES
        for name in _TIMES:
            yield f"{where}.split[{place}].{name}", getattr(split, name), 0, MAX_MS
