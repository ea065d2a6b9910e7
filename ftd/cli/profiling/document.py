"""Turns measurements into a profile file: the values for the planner, the raw data, and their origin."""

from datetime import UTC, datetime

import msgspec

import ftd
from ftd.cli.profiling.network import LinkFit, fit_link, fit_ring
from ftd.config.profile_document import (
    SCHEMA,
    LayerEntry,
    LinkEntry,
    NetworkEntry,
    ProfileDocument,
    ProvenanceEntry,
)
from runtime.wire.measurement import LayerMeasurements, LinkMeasurements


def build_profile_document(
    job: str, layers: LayerMeasurements, links: LinkMeasurements | None, devices_per_node: int
) -> ProfileDocument:
    """Return the content of the profile file.

    :param links: ``None`` if the network was not measured.
    """
    profile = layers.profile
    entries = [
        msgspec.convert(
            {**msgspec.to_builtins(layer), "name": name, "measured": msgspec.to_builtins(rows)}, LayerEntry
        )
        for layer, name, rows in zip(profile.layers, layers.names, layers.rows, strict=True)
    ]
    network = link = ring = None
    if links is not None and links.sent:
        link_fit, ring_fit = fit_link(links), fit_ring(links)
        link, ring = _entry(link_fit), _entry(ring_fit)
        network = NetworkEntry(
            where=links.where,
            point_to_point=links.sent,
            all_reduce=links.reduced,
            link_error=link_fit.error,
            ring_error=ring_fit.error,
        )
    return ProfileDocument(
        schema=SCHEMA,
        microbatch_rows=profile.microbatch_rows,
        layers=tuple(entries),
        device_memory_bytes=profile.device_memory_bytes,
        flops=profile.flops,
        device_peak_flops=profile.device_peak_flops,
        link=link,
        ring=ring,
        inner=ring,
        shard_problem=profile.shard_problem,
        tensor_problem=profile.tensor_problem,
        tensor_counts=profile.tensor_counts,
        network=network,
        provenance=ProvenanceEntry(
            job=job,
            device=layers.device,
            torch_version=layers.torch_version,
            ftd_version=ftd.__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            measured=_measured(layers, network),
            stated=_stated(layers, network, devices_per_node),
        ),
    )


def _entry(fit: LinkFit) -> LinkEntry:
    return LinkEntry(latency_ms=fit.link.latency_ms, bytes_per_s=fit.link.bytes_per_s)


def _measured(layers: LayerMeasurements, network: NetworkEntry | None) -> tuple[str, ...]:
    counts = sorted({entry.rows for rows in layers.rows for entry in rows}, reverse=True)
    statements = [
        f"forward and backward pass of each layer on one device, with {_listed(counts)} rows: medians after a "
        "warm-up",
        "bytes of parameters, gradients, optimizer state, of what autograd holds, and of each layer's output",
    ]
    ways = {
        "fully": all(layer.full is not None for layer in layers.profile.layers),
        "selectively": all(layer.selective is not None for layer in layers.profile.layers),
    }
    if known := " and ".join(way for way, there in ways.items() if there):
        statements.append(f"bytes that each layer holds, and its additional time, if it recomputes {known}")
    if network is not None:
        statements.append(
            f"point-to-point transfers and all-reduces between {network.where}; link and ring are fitted to them"
        )
    return tuple(statements)


def _stated(
    layers: LayerMeasurements, network: NetworkEntry | None, devices_per_node: int
) -> tuple[str, ...]:
    rows = layers.profile.microbatch_rows
    statements = []
    if devices_per_node > 1:
        statements.append(
            "a stage of several devices takes the measured time of one device for the rows of the fullest device"
        )
        if layers.profile.shard_problem is None:
            statements.append(
                "a stage of shards also takes the time to gather and reduce, computed from bytes and "
                + ("inner" if network is not None else "ftd's default network")
            )
        if any(layer.tensor is not None for layer in layers.profile.layers):
            statements.append(
                "a tensor-parallel stage takes its share of the time of one device, and the time of its exchanges, "
                "computed from bytes"
            )
    if devices_per_node < rows:
        devices = f"more than {devices_per_node}" if devices_per_node > 1 else "several"
        statements.append(f"a stage of {devices} devices, d, takes ⌈{rows} / d⌉ / {rows} of the time of one")
    statements += [
        f"not measured, so the model ⌈rows / d⌉ / rows is used: {why[:500]}" for why in layers.unmeasured
    ]
    statements += [f"no layer is recomputed selectively: {why[:500]}" for why in layers.unselectable]
    if network is None:
        statements.append(
            "the network was not measured: ftd's default is used, 0.1 ms and 1e9 bytes per second"
        )
    else:
        statements.append(
            "link and ring between hosts are assumed to equal those between devices of this host"
        )
    return tuple(statements)


def _listed(counts: list[int]) -> str:
    head = ", ".join(map(str, counts[:-1]))
    return f"{head} and {counts[-1]}" if head else str(counts[-1])
