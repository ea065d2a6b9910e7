"""What stands in a profile file, field by field, and in a file of bare layer times.

``docs/reference/profiles.md`` explains both for people; ``docs/reference/profile.schema.json`` is generated from
``ProfileDocument`` (``python -m ftd.observe.view.schema profile``) and a test keeps the two equal. Times are
milliseconds, sizes bytes. ``ftd.config.profile_file`` reads, checks and writes.
"""

from typing import Annotated, Any

import msgspec

SCHEMA_NAME = "ftd-profile"
SCHEMA_VERSION = 1
SCHEMA = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
MAX_LAYERS = 1000
"""The planner's tables grow with the square of it."""
MAX_DEVICES = 1024
"""Of one stage."""

# The upper limits keep every sum that the planner makes finite and every size inside 64 bits.
MOST_MS = 1e9
MOST_BYTES = 2**50
MOST_COUNT = 2**31
MOST_BYTES_PER_S = 1e18
MOST_FLOPS = 1e30
TimeMs = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
Flops = Annotated[float, msgspec.Meta(gt=0, le=MOST_FLOPS)]
SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
Devices = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all: named fields, and no others."""


class SpreadEntry(_Entry, frozen=True, kw_only=True):
    """How far repeated measurements lie apart, in ascending order."""

    repeats: Count
    minimum_ms: TimeMs
    lower_quartile_ms: TimeMs
    median_ms: TimeMs
    upper_quartile_ms: TimeMs
    maximum_ms: TimeMs


class RowsEntry(_Entry, frozen=True, kw_only=True):
    """One layer measured on one device on so many rows."""

    rows: Count
    forward: SpreadEntry
    backward: SpreadEntry


class SplitEntry(_Entry, frozen=True, kw_only=True):
    """One microbatch of one layer on several devices of a node."""

    devices: Annotated[int, msgspec.Meta(ge=2, le=MAX_DEVICES)]
    forward_ms: TimeMs
    backward_ms: TimeMs
    activation_bytes: SizeBytes | None = None
    """What autograd keeps on the fullest of them; null: its share by rows of what one device keeps."""


class RecomputationEntry(_Entry, frozen=True, kw_only=True):
    """One microbatch of one layer on one device that recomputes activations."""

    activation_bytes: SizeBytes
    """What is kept between the forward and the backward pass."""
    recompute_ms: TimeMs
    """How much longer the two take together than without recomputation."""


class TensorSplitEntry(_Entry, frozen=True, kw_only=True):
    """What of one layer tensor parallelism divides, and what its devices exchange for one microbatch."""

    parameter_bytes: SizeBytes
    """Parameters that are divided."""
    column_bytes: SizeBytes
    """Of these, weights of rowwise modules, of which a device also keeps columns and their gradients."""
    activation_bytes: SizeBytes
    """Of what autograd keeps, what is divided."""
    forward_bytes: SizeBytes
    """Activations that are added up over the devices, or put together."""
    forward_exchanges: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
    """Number of operations in which they are."""
    backward_bytes: SizeBytes
    """Gradients that are added up."""
    backward_exchanges: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]


class LayerEntry(_Entry, frozen=True, kw_only=True):
    """What the planner takes for a layer, and what that was taken from."""

    name: Text | None = None
    forward_ms: TimeMs
    """One microbatch on one device: the median."""
    backward_ms: TimeMs
    parameter_bytes: SizeBytes
    gradient_bytes: SizeBytes
    optimizer_bytes: SizeBytes
    activation_bytes: SizeBytes
    """What autograd keeps between the forward and the backward pass of one microbatch."""
    output_bytes: SizeBytes
    """What crosses to the next stage in one direction for one microbatch."""
    full: RecomputationEntry | None = None
    """null: the layer keeps its input, and its forward pass is done again."""
    selective: RecomputationEntry | None = None
    """null: not measured, or the layer cannot be recomputed so."""
    tensor: TensorSplitEntry | None = None
    """null: tensor parallelism divides nothing of the layer."""
    split: tuple[SplitEntry, ...] = ()
    """For a number of devices that is missing the model is ⌈rows / d⌉ / rows of the time of one."""
    measured: tuple[RowsEntry, ...] = ()
    """The raw measurements, most rows first."""


class LinkEntry(_Entry, frozen=True, kw_only=True):
    """Moving s bytes takes latency_ms + 1000 · s / bytes_per_s."""

    latency_ms: TimeMs
    bytes_per_s: Annotated[float, msgspec.Meta(ge=1, le=MOST_BYTES_PER_S)]


class PointToPointEntry(_Entry, frozen=True, kw_only=True):
    """So many bytes from one device to another, one way."""

    size_bytes: SizeBytes
    time: SpreadEntry


class AllReduceEntry(_Entry, frozen=True, kw_only=True):
    """So many bytes summed over a group of devices."""

    members: Annotated[int, msgspec.Meta(ge=2, le=MAX_DEVICES)]
    size_bytes: SizeBytes
    time: SpreadEntry


class NetworkEntry(_Entry, frozen=True, kw_only=True):
    """What ``link`` and ``ring`` were fitted to, and how well they say it."""

    where: Text
    """Between what was measured, and over what."""
    point_to_point: tuple[PointToPointEntry, ...]
    all_reduce: tuple[AllReduceEntry, ...]
    link_error: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """By which a measurement typically differs from the fit: 0.1 is a tenth more or less."""
    ring_error: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class ProvenanceEntry(_Entry, frozen=True, kw_only=True):
    """Where a profile comes from."""

    job: Text
    device: Text
    torch_version: Text
    ftd_version: Text
    date: Text
    """ISO 8601, UTC."""
    measured: tuple[Text, ...]
    """What was measured, in words."""
    stated: tuple[Text, ...]
    """What was not measured, and which model stands in for it."""


class ProfileDocument(_Entry, frozen=True, kw_only=True):
    """A profile file."""

    schema: Annotated[str, msgspec.Meta(pattern=f"^{SCHEMA}$")]
    microbatch_rows: Count
    """Samples of the microbatch that times, activations and outputs are of."""
    layers: Annotated[tuple[LayerEntry, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    device_memory_bytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)] | None = None
    """Memory of one device; null applies no memory limit."""
    stage_devices: Annotated[tuple[Devices, ...], msgspec.Meta(min_length=1)] | None = None
    """How many devices a stage can have, ascending; null: any number up to microbatch_rows."""
    link: LinkEntry | None = None
    """Activations and their gradients, from stage to stage; null: ftd's default, 0.1 ms and 1 GB/s."""
    ring: LinkEntry | None = None
    """One hop of an all-reduce of gradients; null: as ``link``."""
    inner: LinkEntry | None = None
    """One hop of a ring among the devices of one node; null: as ``ring``."""
    shard_problem: Text | None = None
    """Why the devices of a stage cannot hold shards of the model, in words; null: they can."""
    tensor_problem: Text | None = None
    """Why the devices of a stage cannot compute parts of the model's layers, in words; null: they can, where a layer
    has ``tensor``."""
    tensor_counts: tuple[tuple[Text, Count], ...] = ()
    """Numbers that the devices of a tensor-parallel stage must divide, each with the words that name it."""
    flops: Flops | None = None
    """Floating-point operations of the microbatch, forward and backward, for MFU; null: unknown."""
    device_peak_flops: Flops | None = None
    """Operations per second that one device can do at most; null: unknown."""
    network: NetworkEntry | None = None
    provenance: ProvenanceEntry | None = None


class TimedLayer(_Entry, frozen=True, kw_only=True):
    """A layer of a file of bare layer times."""

    forward_ms: TimeMs
    backward_ms: TimeMs
    allreduce_in_node_ms: dict[str, Any]
    """Number of devices → what their communication adds to the forward, and again to the backward pass."""


class LayerTimesFile(_Entry, frozen=True, kw_only=True):
    """A file of bare layer times: no sizes, no network, no memory."""

    kind: Text
    layers: Annotated[tuple[TimedLayer, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
