"""Finds contradictions between entries of a profile that are valid one by one.

Every error is a ``ConfigurationError`` with the path of the field; ``ftd.config.profile_file`` adds the file.
"""

import json
import re
from itertools import pairwise
from typing import Any, NoReturn

from ftd.config.profile_document import (
    SCHEMA,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    LayerEntry,
    LayerTimesFile,
    ProfileDocument,
    TimedLayer,
)
from ftd.errors import ConfigurationError
from runtime.wire.measurement import MAX_DEVICES, TimingSpread


def check_schema(tree: dict[str, Any]) -> None:
    """Check that the file is a profile of a known version.

    :raises ConfigurationError: the schema is missing, unknown, or of a newer version.
    """
    if "schema" not in tree:
        raise ConfigurationError(
            "required, but missing",
            field="schema",
            remedy=f'name a profile file; it begins with "schema": "{SCHEMA}"',
        )
    written = tree["schema"]
    match = re.fullmatch(rf"{SCHEMA_NAME}/([0-9]{{1,9}})", written) if isinstance(written, str) else None
    if match and int(match[1]) > SCHEMA_VERSION:
        raise ConfigurationError(
            f"this profile has version {int(match[1])}, but this version of ftd reads up to {SCHEMA_VERSION}",
            field="schema",
            remedy="use the version of ftd that wrote it or a newer one, or measure again: ftd profile JOB.toml",
        )
    if written != SCHEMA:
        raise ConfigurationError(
            f"{format_value(written)} is not known", field="schema", remedy=f'known: "{SCHEMA}"'
        )


def check_document(document: ProfileDocument) -> None:
    """Check that the entries of a profile do not contradict each other.

    :raises ConfigurationError: two entries contradict each other; the error names the fields.
    """
    _check_ascending(document.stage_devices or (), "stage_devices")
    _check_some_time([(e.forward_ms, e.backward_ms) for e in document.layers])
    for number, layer in enumerate(document.layers):
        field = f"layers[{number}]"
        _check_split(document, layer, field)
        for index, entry in enumerate(layer.measured):
            _check_spread(entry.forward, f"{field}.measured[{index}].forward")
            _check_spread(entry.backward, f"{field}.measured[{index}].backward")
        _check_measured(layer, document.microbatch_rows, field)
    if document.network is not None:
        for index, sent in enumerate(document.network.point_to_point):
            _check_spread(sent.time, f"network.point_to_point[{index}].time")
        for index, reduced in enumerate(document.network.all_reduce):
            _check_spread(reduced.time, f"network.all_reduce[{index}].time")


def _check_split(document: ProfileDocument, layer: LayerEntry, field: str) -> None:
    devices = tuple(split.devices for split in layer.split)
    _check_ascending(devices, f"{field}.split", " of devices")
    rows, allowed = document.microbatch_rows, document.stage_devices
    for index, count in enumerate(devices):
        name = f"{field}.split[{index}].devices"
        if allowed is None and count > rows:
            reject_value(name, count, f"at most microbatch_rows, {rows}: a microbatch is split by rows")
        if allowed is not None and count not in allowed:
            reject_value(name, count, "one of stage_devices, " + ", ".join(map(str, allowed)))
    missing = [d for d in allowed or () if d > rows and d > 1 and d not in devices]
    if missing:
        raise ConfigurationError(
            f"the time on {missing[0]} devices is missing, and {rows} rows cannot be split over so many devices",
            field=f"{field}.split",
            remedy=f"add an entry for {missing[0]} devices, or remove {missing[0]} from stage_devices",
        )


def _check_measured(layer: LayerEntry, rows: int, field: str) -> None:
    for entry in layer.measured:
        if entry.rows != rows:
            continue
        for name, spread in (("forward_ms", entry.forward), ("backward_ms", entry.backward)):
            value = getattr(layer, name)
            low, high = spread.minimum_ms, spread.maximum_ms
            if not low <= value <= high:
                reject_value(
                    f"{field}.{name}", value, f"a value between {low} and {high}, the range that was measured"
                )


def _check_spread(spread: TimingSpread, field: str) -> None:
    names = ("minimum_ms", "lower_quartile_ms", "median_ms", "upper_quartile_ms", "maximum_ms")
    for low, high in pairwise(names):
        if getattr(spread, low) > getattr(spread, high):
            reject_value(f"{field}.{high}", getattr(spread, high), f"at least {low}, {getattr(spread, low)}")


def check_layer_times(timed: LayerTimesFile) -> None:
    """Check a file of bare layer times.

    :raises ConfigurationError: layers list different numbers of devices, or a time is invalid.
    """
    counts = device_counts(timed.layers[0])
    for number, layer in enumerate(timed.layers):
        field = f"layers[{number}].allreduce_in_node_ms"
        for name, value in layer.allreduce_in_node_ms.items():
            if not re.fullmatch(r"[1-9][0-9]{0,3}", name) or int(name) > MAX_DEVICES:
                raise ConfigurationError(
                    f"{format_value(name)} is not a number of devices",
                    field=field,
                    remedy=f"write 1 to {MAX_DEVICES}",
                )
            usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e9
            if not usable:
                reject_value(f"{field}.{name}", value, "a number from 0 to 1e9")
        here = device_counts(layer)
        if here != counts:
            raise ConfigurationError(
                f"lists {_listed(here)} devices, layer 0 lists {_listed(counts)}",
                field=field,
                remedy="list the same numbers of devices in all layers",
            )
    if 1 not in counts:
        raise ConfigurationError(
            'required, but missing: "1"',
            field="layers[0].allreduce_in_node_ms",
            remedy='add "1": 0 to all layers',
        )
    _check_some_time([(layer.forward_ms, layer.backward_ms) for layer in timed.layers])


def device_counts(layer: TimedLayer) -> tuple[int, ...]:
    """Return the numbers of devices that a layer lists, ascending, without keys that are not numbers."""
    return tuple(sorted(int(n) for n in layer.allreduce_in_node_ms if re.fullmatch(r"[1-9][0-9]{0,3}", n)))


def _check_some_time(times_ms: list[tuple[float, float]]) -> None:
    if not any(forward + backward > 0 for forward, backward in times_ms):
        raise ConfigurationError(
            "all layers take 0 ms", field="layers", remedy="measure the layers: ftd profile JOB.toml"
        )


def _check_ascending(counts: tuple[int, ...], field: str, what: str = "") -> None:
    for low, high in pairwise(counts):
        if low >= high:
            raise ConfigurationError(
                f"{high} comes after {low}",
                field=field,
                remedy=f"list each number{what} once, ascending",
            )


def reject_value(field: str, value: Any, wanted: str) -> NoReturn:
    """Raise an error about a value.

    :raises ConfigurationError: always, with the value and what to write instead.
    """
    raise ConfigurationError(
        f"{format_value(value)} is not allowed", field=field or None, remedy=f"write {wanted}"
    )


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts)) or "no"


def format_value(value: Any) -> str:
    """Return a value for a message: short, in JSON notation."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def join_path(field: str, name: str) -> str:
    """Return the path of ``name`` in the object at ``field``."""
    return f"{field}.{name}" if field else name
