"""Declares the fields of a profile file, and of a file of bare layer times.

``docs/reference/profiles.md`` explains both for people. ``docs/reference/profile.schema.json`` is generated
from ``ProfileDocument`` (``python -m ftd.observe.view.schema profile``), and a test keeps the two equal.
Times are in milliseconds, sizes in bytes. ``ftd.config.profile_file`` reads, checks and writes the files.
"""

from typing import Annotated, Any

import msgspec

from runtime.wire.measurement import (
    MAX_BYTES,
    MAX_DEVICES,
    AllReduceTiming,
    Count,
    PointToPointTiming,
    RowTimings,
    SizeBytes,
    TimeMs,
)

SCHEMA_NAME = "ftd-profile"
SCHEMA_VERSION = 1
SCHEMA = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
MAX_LAYERS = 1000
"""Limit because the planner's tables grow with the square of the number of layers."""
MAX_BYTES_PER_S = 1e18
MAX_FLOPS = 1e30
Flops = Annotated[float, msgspec.Meta(gt=0, le=MAX_FLOPS)]
Devices = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all entries: only the declared fields are allowed."""


class SplitEntry(_Entry, frozen=True, kw_only=True):
    """Time of one microbatch of one layer split over several devices of a node."""

    devices: Annotated[int, msgspec.Meta(ge=2, le=MAX_DEVICES)]
    forward_ms: TimeMs
    backward_ms: TimeMs
    activation_bytes: SizeBytes | None = None
    """Bytes that autograd holds on the fullest of the devices; null: the share, by rows, of what one device
    holds.
    """


class RecomputationEntry(_Entry, frozen=True, kw_only=True):
    """Cost of one microbatch of one layer on one device that recomputes activations."""

    activation_bytes: SizeBytes
    """Bytes held between the forward and the backward pass."""
    recompute_ms: TimeMs
    """Additional time of both passes together compared with no recomputation."""


class TensorSplitEntry(_Entry, frozen=True, kw_only=True):
    """Parts of one layer that tensor parallelism divides, and what its devices exchange for one microbatch."""

    parameter_bytes: SizeBytes
    """Parameters that are divided."""
    column_bytes: SizeBytes
    """Part of ``parameter_bytes`` in weights of rowwise modules; a device also holds columns of these, with
    gradients.
    """
    activation_bytes: SizeBytes
    """Part of the bytes held by autograd that is divided."""
    forward_bytes: SizeBytes
    """Activations that are summed or gathered over the devices."""
    forward_exchanges: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
    """Number of these operations."""
    backward_bytes: SizeBytes
    """Gradients that are summed over the devices."""
    backward_exchanges: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]


class LayerEntry(_Entry, frozen=True, kw_only=True):
    """Values of one layer that the planner uses, and the measurements from which they come."""

    name: Text | None = None
    forward_ms: TimeMs
    """Median time of one microbatch on one device."""
    backward_ms: TimeMs
    parameter_bytes: SizeBytes
    gradient_bytes: SizeBytes
    optimizer_bytes: SizeBytes
    activation_bytes: SizeBytes
    """Bytes that autograd holds between the forward and the backward pass of one microbatch."""
    output_bytes: SizeBytes
    """Bytes sent to the next stage, in one direction, for one microbatch."""
    working_bytes: SizeBytes = 0
    """Largest number of bytes that the two passes of one microbatch need for a moment, in addition to
    ``activation_bytes`` and the summed gradients.
    """
    buffer_bytes: SizeBytes = 0
    """Part of ``parameter_bytes`` in persistent buffers, which are whole on each device of a stage."""
    full: RecomputationEntry | None = None
    """Recomputation of the whole layer; null: the layer holds its input and repeats its forward pass."""
    selective: RecomputationEntry | None = None
    """Selective recomputation; null: not measured, or not possible for this layer."""
    tensor: TensorSplitEntry | None = None
    """Tensor parallelism; null: it divides nothing of this layer."""
    split: tuple[SplitEntry, ...] = ()
    """Times on several devices; a missing number of devices d is modelled as ⌈rows / d⌉ / rows of the time of
    one.
    """
    measured: tuple[RowTimings, ...] = ()
    """Raw measurements, most rows first."""


class LinkEntry(_Entry, frozen=True, kw_only=True):
    """Linear model of a link: moving s bytes takes latency_ms + 1000 · s / bytes_per_s."""

    latency_ms: TimeMs
    bytes_per_s: Annotated[float, msgspec.Meta(ge=1, le=MAX_BYTES_PER_S)]


class NetworkEntry(_Entry, frozen=True, kw_only=True):
    """Measurements to which ``link`` and ``ring`` were fitted, and the quality of the fit."""

    where: Text
    """Endpoints and medium of the measurement."""
    point_to_point: tuple[PointToPointTiming, ...]
    all_reduce: tuple[AllReduceTiming, ...]
    link_error: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """Typical deviation of a measurement from the fit: 0.1 is a tenth more or less."""
    ring_error: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class ProvenanceEntry(_Entry, frozen=True, kw_only=True):
    """Origin of a profile."""

    job: Text
    device: Text
    torch_version: Text
    ftd_version: Text
    date: Text
    """ISO 8601, UTC."""
    measured: tuple[Text, ...]
    """Descriptions of what was measured."""
    stated: tuple[Text, ...]
    """Descriptions of what was not measured, and of the model used instead."""


class ProfileDocument(_Entry, frozen=True, kw_only=True):
    """A profile file."""

    schema: Annotated[str, msgspec.Meta(pattern=f"^{SCHEMA}$")]
    microbatch_rows: Count
    """Samples of the microbatch that times, activations and outputs refer to."""
    layers: Annotated[tuple[LayerEntry, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    device_memory_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)] | None = None
    """Memory of one device; null: no memory limit."""
    stage_devices: Annotated[tuple[Devices, ...], msgspec.Meta(min_length=1)] | None = None
    """Numbers of devices that a stage can have, ascending; null: any number up to microbatch_rows."""
    link: LinkEntry | None = None
    """Link that carries activations and their gradients between stages; null: ftd's default, 0.1 ms and 1 GB/s."""
    ring: LinkEntry | None = None
    """One hop of an all-reduce of gradients; null: the same as ``link``."""
    inner: LinkEntry | None = None
    """One hop of a ring among the devices of one node; null: the same as ``ring``."""
    shard_problem: Text | None = None
    """Reason in words why the devices of a stage cannot hold shards of the model; null: they can."""
    tensor_problem: Text | None = None
    """Reason in words why the devices of a stage cannot compute parts of the model's layers; null: they can, for
    layers that have ``tensor``.
    """
    tensor_counts: tuple[tuple[Text, Count], ...] = ()
    """Numbers that the devices of a tensor-parallel stage must divide, each with a description."""
    flops: Flops | None = None
    """Floating-point operations of the microbatch, forward and backward, for MFU; null: unknown."""
    device_peak_flops: Flops | None = None
    """Largest number of operations per second of one device; null: unknown."""
    network: NetworkEntry | None = None
    provenance: ProvenanceEntry | None = None


class TimedLayer(_Entry, frozen=True, kw_only=True):
    """Layer in a file of bare layer times."""

    forward_ms: TimeMs
    backward_ms: TimeMs
    allreduce_in_node_ms: dict[str, Any]
    """Number of devices → time that their communication adds to the forward pass, and again to the backward
    pass.
    """


class LayerTimesFile(_Entry, frozen=True, kw_only=True):
    """File of bare layer times, without sizes, network or memory."""

    kind: Text
    layers: Annotated[tuple[TimedLayer, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
