"""Reads, checks and writes profile files.

``load_profile`` reads two formats, both JSON: ftd's own (``ProfileDocument``) and bare layer times
(``LayerTimesFile``). Any problem with a file is a ``ConfigurationError`` that names the field.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from ftd.config.profile_document import (
    SCHEMA,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    LayerEntry,
    LayerTimesFile,
    LinkEntry,
    ProfileDocument,
    TimedLayer,
)
from ftd.config.validation import convert
from ftd.errors import ConfigurationError
from planner.values import LayerProfile, Link, ModelProfile, SplitTime
from runtime.wire.measurement import MAX_DEVICES, TimingSpread
from storage.atomic import write_whole

T = TypeVar("T")

MAX_FILE_BYTES = 16 * 1024 * 1024
_REMEDY = "correct it, or measure a profile: ftd profile JOB.toml"
_STEP = re.compile(r"(\w+)|\[(\d+)\]")


def load_profile(path: Path) -> ModelProfile:
    """Return the profile in a file of either format.

    A file of bare layer times has no sizes and a network that costs nothing; its times are those of one row.

    :raises ConfigurationError: a value is wrong; the error names the file, the field and the remedy.
    """
    found = load_document(path)
    return timed_profile(found) if isinstance(found, LayerTimesFile) else model_profile(found)


def load_document(path: Path) -> ProfileDocument | LayerTimesFile:
    """Return the checked content of a file of either format.

    :raises ConfigurationError: a value is wrong; the error names the file, the field and the remedy.
    """
    tree = _read_json(path)
    try:
        _check_tree(tree)
        if not isinstance(tree, dict):
            raise ConfigurationError(
                f"a profile is a JSON object, but this is {_format_value(tree)}",
                remedy="measure a profile: ftd profile JOB.toml",
            )
        if "schema" not in tree and _has_bare_times(tree):
            timed = _convert(tree, LayerTimesFile)
            _check_layer_times(timed)
            return timed
        _check_schema(tree)
        document = _convert(tree, ProfileDocument)
        _check_document(document)
    except ConfigurationError as error:
        field = f"{path.name}: {error.field}" if error.field else path.name
        raise ConfigurationError(error.problem, field=field, remedy=error.remedy or _REMEDY) from None
    return document


def save_profile(path: Path, document: ProfileDocument) -> None:
    """Write a profile; an existing file is replaced atomically.

    :raises ConfigurationError: the file cannot be written, or the profile is invalid.
    """
    _check_document(document)
    text = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error}", remedy="name a file in a directory that you may write to"
        ) from None


def model_profile(document: ProfileDocument) -> ModelProfile:
    """Return the part of a profile file that the planner uses."""
    link = document.link or LinkEntry(**msgspec.to_builtins(Link()))
    complete = msgspec.structs.replace(document, link=link, ring=document.ring or link)
    return msgspec.convert(complete, ModelProfile, from_attributes=True)


def timed_profile(timed: LayerTimesFile) -> ModelProfile:
    """Return layer times as a profile: d devices take forward/d + a[d] and backward/d + a[d]."""
    counts = _device_counts(timed.layers[0])
    free = Link(latency_ms=0.0)
    return ModelProfile(
        layers=tuple(_timed_layer(layer, counts) for layer in timed.layers),
        microbatch_rows=1,
        stage_devices=counts,
        link=free,
        ring=free,
    )


def _timed_layer(layer: TimedLayer, counts: tuple[int, ...]) -> LayerProfile:
    extra_ms = {d: float(layer.allreduce_in_node_ms[str(d)]) for d in counts}
    return LayerProfile(
        forward_ms=layer.forward_ms,
        backward_ms=layer.backward_ms,
        parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        activation_bytes=0,
        output_bytes=0,
        split=tuple(
            SplitTime(
                devices=d,
                forward_ms=layer.forward_ms / d + extra_ms[d],
                backward_ms=layer.backward_ms / d + extra_ms[d],
            )
            for d in counts
            if d > 1
        ),
    )


# --- JSON --------------------------------------------------------------------------------------


class _DuplicateKey:
    """Marker for an object that has the same key twice, which JSON parsers accept silently."""

    def __init__(self, name: str) -> None:
        self.name = name


def _read_json(path: Path) -> Any:
    """Return the JSON in a file.

    :raises ConfigurationError: there is no file, or no valid JSON in it.
    """
    try:
        if path.is_dir():
            raise ConfigurationError(f"{path} is a directory", remedy="name the profile in it")
        if not path.exists():
            raise ConfigurationError(f"{path} does not exist", remedy="check the path")
        if not path.is_file():
            raise ConfigurationError(f"{path} is not a regular file", remedy="name a JSON file")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", remedy="check its permissions") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigurationError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes", remedy="is it the right file?"
        )
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}", remedy=_REMEDY) from None


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    return _DuplicateKey(next(name for name in names if names.count(name) > 1))


def _check_tree(tree: Any) -> None:
    """Check what msgspec does not check.

    :raises ConfigurationError: a duplicate key, a number that is not finite, or invalid text.
    """
    for field, value in _leaves(tree):
        if isinstance(value, _DuplicateKey):
            raise ConfigurationError(
                "the key appears twice", field=_join_path(field, value.name), remedy="keep one of the two"
            )
        if isinstance(value, float) and not math.isfinite(value):
            _reject_value(field, value, "a finite number")
        if isinstance(value, str) and not _is_text(value):
            raise ConfigurationError(f"{value!a} is not valid text", field=field or None, remedy=_REMEDY)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path of every key and of every value that is neither an object nor a list.

    It is not recursive: a file may nest as deep as the parser allows.
    """
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack:
        field, value = stack.pop()
        if isinstance(value, dict):
            for key in value:
                yield field, key
            stack += [(_join_path(field, key), below) for key, below in value.items()]
        elif isinstance(value, list):
            stack += [(f"{field}[{index}]", below) for index, below in enumerate(value)]
        else:
            yield field, value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _convert(tree: dict[str, Any], into: type[T]) -> T:
    """Return the tree as the Struct ``into``.

    :raises ConfigurationError: a field is missing, unknown, or invalid.
    """
    try:
        return convert(tree, into)
    except ConfigurationError as errors:
        error = errors.errors[0]  # The others are probably the same error in the other layers.
        if error.remedy is not None or error.field is None:
            raise error from None
        value = _at(tree, error.field)
        if isinstance(value, dict | list):
            raise error from None
        problem = error.problem[:1].lower() + error.problem[1:]
        raise ConfigurationError(
            f"{_format_value(value)} is not allowed: {problem}", field=error.field
        ) from None


def _at(tree: Any, field: str) -> Any:
    for name, index in _STEP.findall(field):
        tree = tree[name] if name else tree[int(index)]
    return tree


def _has_bare_times(tree: dict[str, Any]) -> bool:
    layers = tree.get("layers")
    first = layers[0] if isinstance(layers, list) and layers else None
    return "kind" in tree or (isinstance(first, dict) and "allreduce_in_node_ms" in first)


# --- contradictions between entries that are valid one by one -----------------------------------


def _check_schema(tree: dict[str, Any]) -> None:
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
            f"{_format_value(written)} is not known", field="schema", remedy=f'known: "{SCHEMA}"'
        )


def _check_document(document: ProfileDocument) -> None:
    """Check that the entries of a profile do not contradict each other.

    :raises ConfigurationError: two entries contradict each other; the error names the fields.
    """
    _check_ascending(document.stage_devices or (), "stage_devices")
    _check_some_time(document.layers)
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
            _reject_value(name, count, f"at most microbatch_rows, {rows}: a microbatch is split by rows")
        if allowed is not None and count not in allowed:
            _reject_value(name, count, "one of stage_devices, " + ", ".join(map(str, allowed)))
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
                _reject_value(
                    f"{field}.{name}", value, f"a value between {low} and {high}, the range that was measured"
                )


def _check_spread(spread: TimingSpread, field: str) -> None:
    names = ("minimum_ms", "lower_quartile_ms", "median_ms", "upper_quartile_ms", "maximum_ms")
    for low, high in pairwise(names):
        if getattr(spread, low) > getattr(spread, high):
            _reject_value(f"{field}.{high}", getattr(spread, high), f"at least {low}, {getattr(spread, low)}")


def _check_layer_times(timed: LayerTimesFile) -> None:
    """Check a file of bare layer times.

    :raises ConfigurationError: layers list different numbers of devices, or a time is invalid.
    """
    counts = _device_counts(timed.layers[0])
    for number, layer in enumerate(timed.layers):
        field = f"layers[{number}].allreduce_in_node_ms"
        for name, value in layer.allreduce_in_node_ms.items():
            if not re.fullmatch(r"[1-9][0-9]{0,3}", name) or int(name) > MAX_DEVICES:
                raise ConfigurationError(
                    f"{_format_value(name)} is not a number of devices",
                    field=field,
                    remedy=f"write 1 to {MAX_DEVICES}",
                )
            usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e9
            if not usable:
                _reject_value(f"{field}.{name}", value, "a number from 0 to 1e9")
        here = _device_counts(layer)
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
    _check_some_time(timed.layers)


def _device_counts(layer: TimedLayer) -> tuple[int, ...]:
    """Return the numbers of devices that a layer lists, ascending, without keys that are not numbers."""
    return tuple(sorted(int(n) for n in layer.allreduce_in_node_ms if re.fullmatch(r"[1-9][0-9]{0,3}", n)))


def _check_some_time(layers: Sequence[LayerEntry | TimedLayer]) -> None:
    if not any(layer.forward_ms + layer.backward_ms > 0 for layer in layers):
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


def _reject_value(field: str, value: Any, wanted: str) -> NoReturn:
    """Raise an error about a value.

    :raises ConfigurationError: always, with the value and what to write instead.
    """
    raise ConfigurationError(
        f"{_format_value(value)} is not allowed", field=field or None, remedy=f"write {wanted}"
    )


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts)) or "no"


def _format_value(value: Any) -> str:
    """Return a value for a message: short, in JSON notation."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _join_path(field: str, name: str) -> str:
    """Return the path of ``name`` in the object at ``field``."""
    return f"{field}.{name}" if field else name
