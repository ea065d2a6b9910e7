"""Renders the measurements of ``ftd profile`` as tables."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.config.profile_document import LayerEntry, LinkEntry, NetworkEntry, ProfileDocument
from ftd.observe.view.blocks import add_numbers, plain_table
from ftd.observe.view.text import format_size, plural
from runtime.wire.measurement import TimingSpread

_MAX_COUNTS = 6
"""Largest number of columns in the table of stages; beyond it, only powers of two and the largest count are
shown.
"""


def render_profile(document: ProfileDocument) -> RenderableType:
    """Return the layers, the network and the provenance; readable at 80 columns."""
    count = plural(len(document.layers), "layer")
    room = document.device_memory_bytes
    memory = f", {format_size(room)} of memory" if room is not None else ""
    rows = plural(document.microbatch_rows, "row")
    parts: list[RenderableType] = [
        Text.assemble(("Layers", "bold"), (f"  {count}, microbatches of {rows}{memory}; times in ms", "dim")),
        _layers(document),
    ]
    if any(layer.split for layer in document.layers):
        head = (
            ("Stages", "bold"),
            ("  forward and backward, the microbatch split by rows; times in ms", "dim"),
        )
        parts += ["", Text.assemble(*head), _stages(document)]
        parts.append(Text(_shards(document), style="dim"))
    if document.network is not None:
        parts += ["", Text.assemble(("Network", "bold"), (f"  {document.network.where}; times in ms", "dim"))]
        parts += [_network(document.network), _fits(document)]
    if document.provenance is not None:
        origin = document.provenance
        parts += ["", Text(f"measured on {origin.device}, torch {origin.torch_version}", style="dim")]
        parts += [Text(f"stated: {line}", style="dim") for line in origin.stated]
    return Group(*parts)


def _shards(document: ProfileDocument) -> str:
    if document.shard_problem is not None:
        return f"these devices cannot hold shards: {document.shard_problem}"
    shards = (
        "as shards: the same times plus those of gathering and reducing, which are computed, not measured"
    )
    if document.tensor_problem is not None:
        return f"{shards}\nthey cannot be tensor-parallel: {document.tensor_problem}"
    if all(layer.tensor is None for layer in document.layers):
        return shards
    tensor = "tensor-parallel: each device computes all rows with a part of each linear module"
    return f"{shards}\n{tensor}; computed, not measured"


def format_spread(entry: TimingSpread) -> str:
    """Return the median and half of the interquartile range: ``1.52 ± 0.04``."""
    half_ms = (entry.upper_quartile_ms - entry.lower_quartile_ms) / 2
    digits = 3 if entry.median_ms < 1 else 2 if entry.median_ms < 100 else 1
    return f"{entry.median_ms:.{digits}f} ± {half_ms:.{digits}f}"


def _layers(document: ProfileDocument) -> Table:
    table = plain_table(gap=1)
    table.add_column("layer", no_wrap=True, max_width=16)
    add_numbers(table, "forward", "backward", "params", "optimizer", "activ.", "output")
    for number, layer in enumerate(document.layers):
        sizes = (layer.parameter_bytes, layer.optimizer_bytes, layer.activation_bytes, layer.output_bytes)
        table.add_row(
            _name(number, layer), *_passes(layer, document.microbatch_rows), *map(format_size, sizes)
        )
    return table


def _passes(layer: LayerEntry, rows: int) -> tuple[str, str]:
    whole = next((entry for entry in layer.measured if entry.rows == rows), None)
    if whole is None:
        return f"{layer.forward_ms:.3f}", f"{layer.backward_ms:.3f}"
    return format_spread(whole.forward), format_spread(whole.backward)


def _stages(document: ProfileDocument) -> Table:
    """Return how long both passes of a microbatch take for each layer, on one device and on several."""
    counts = sorted({split.devices for layer in document.layers for split in layer.split})
    if len(counts) > _MAX_COUNTS:
        counts = [count for count in counts if count & (count - 1) == 0 or count == counts[-1]]
    table = plain_table(gap=1)
    table.add_column("layer", no_wrap=True, max_width=16)
    add_numbers(table, *(plural(count, "device") for count in (1, *counts)))
    for number, layer in enumerate(document.layers):
        times = {1: layer.forward_ms + layer.backward_ms}
        times |= {split.devices: split.forward_ms + split.backward_ms for split in layer.split}
        cells = (f"{times[count]:.3f}" if count in times else "–" for count in (1, *counts))
        table.add_row(_name(number, layer), *cells)
    return table


def _name(number: int, layer: LayerEntry) -> str:
    return f"{number} {layer.name or ''}".strip()


def _network(network: NetworkEntry) -> Table:
    members = sorted({entry.members for entry in network.all_reduce})
    times = {(1, entry.size_bytes): entry.time for entry in network.point_to_point}
    times |= {(entry.members, entry.size_bytes): entry.time for entry in network.all_reduce}
    table = plain_table(gap=1)
    add_numbers(table, "bytes", "one way", *(f"all-reduce of {count}" for count in members))
    for length in sorted({length for _, length in times}):
        cells = (times.get((count, length)) for count in (1, *members))
        table.add_row(format_size(length), *(format_spread(cell) if cell else "–" for cell in cells))
    return table


def _fits(document: ProfileDocument) -> Text:
    network = document.network
    assert network is not None, "only called for a profile with a network"
    lines = (("link", document.link, network.link_error), ("ring", document.ring, network.ring_error))
    fits = [f"{name} {_link(entry)}, off by {error:.0%}" for name, entry, error in lines if entry is not None]
    return Text("fitted: " + "; ".join(fits))


def _link(entry: LinkEntry) -> str:
    return f"{entry.latency_ms:.3f} ms + {entry.bytes_per_s / 1e9:.3g} GB/s"
