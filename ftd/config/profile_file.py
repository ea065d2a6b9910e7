"""Reads, checks and writes profile files.

``load_profile`` reads two formats, both JSON: ftd's own (``ProfileDocument``) and bare layer times
(``LayerTimesFile``). Any problem with a file is a ``ConfigurationError`` that names the field.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftd.config.profile_checks import (
    check_document,
    check_layer_times,
    check_schema,
    device_counts,
    format_value,
    join_path,
    reject_value,
)
from ftd.config.profile_document import (
    LayerTimesFile,
    LinkEntry,
    ProfileDocument,
    TimedLayer,
)
from ftd.config.validation import convert
from ftd.errors import ConfigurationError
from planner.values import LayerProfile, Link, ModelProfile, SplitTime

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
                f"a profile is a JSON object, but this is {format_value(tree)}",
                remedy="measure a profile: ftd profile JOB.toml",
            )
        if "schema" not in tree and _has_bare_times(tree):
            timed = _convert(tree, LayerTimesFile)
            check_layer_times(timed)
            return timed
        check_schema(tree)
        document = _convert(tree, ProfileDocument)
        check_document(document)
    except ConfigurationError as error:
        field = f"{path.name}: {error.field}" if error.field else path.name
        raise ConfigurationError(error.problem, field=field, remedy=error.remedy or _REMEDY) from None
    return document


def save_profile(path: Path, document: ProfileDocument) -> None:
    """Write a profile; an existing file is replaced atomically.

    :raises ConfigurationError: the file cannot be written, or the profile is invalid.
    """
    check_document(document)
    text = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    partial = path.with_name(f".{path.name}.part")
    try:
        try:
            partial.write_bytes(text)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
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
    counts = device_counts(timed.layers[0])
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
                "the key appears twice", field=join_path(field, value.name), remedy="keep one of the two"
            )
        if isinstance(value, float) and not math.isfinite(value):
            reject_value(field, value, "a finite number")
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
            stack += [(join_path(field, key), below) for key, below in value.items()]
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
            f"{format_value(value)} is not allowed: {problem}", field=error.field
        ) from None


def _at(tree: Any, field: str) -> Any:
    for name, index in _STEP.findall(field):
        tree = tree[name] if name else tree[int(index)]
    return tree


def _has_bare_times(tree: dict[str, Any]) -> bool:
    layers = tree.get("layers")
    first = layers[0] if isinstance(layers, list) and layers else None
    return "kind" in tree or (isinstance(first, dict) and "allreduce_in_node_ms" in first)
