"""Batches: trees of dicts, tuples and lists whose leaves are tensors, numbers, strings or ``None``.

The rows of a batch are dim 0 of its tensors. A batch is always made for a whole microbatch on the host; the
devices that share a microbatch take slices of it afterwards.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.device import flat_bytes
from runtime.errors import TrainingError

Batch = Any
"""``Tensor | int | float | bool | str | None | tuple[Batch, ...] | list[Batch] | dict[str, Batch]``."""

_REMEDY = "give Training.collate, or pad/pack the samples"
_WIDER = {"uint16": np.int64, "uint32": np.int64, "uint64": np.int64}
"""Wider types for those in token files with which torch can hardly compute, and cannot index."""


# --- collating -----------------------------------------------------------------------------------


def default_collate(samples: Sequence[Any]) -> Batch:
    """Stack samples to a batch, recursively through dicts, tuples and lists.

    Tensors, numpy arrays, numbers, and lists of numbers (as Hugging Face ``datasets`` returns them) become
    tensors with a new dim 0. Strings become a list. ``None`` stays if all samples have it.

    :raises TrainingError: samples differ in structure or shape, or have a type that cannot be stacked.
    """
    return _stack(samples, "")


def _stack(values: Sequence[Any], path: str) -> Batch:
    first = values[0]
    match first:
        case Tensor():
            return _stack_tensors(values, path)
        case str():
            _check_alike(
                values, path, lambda value: "a string" if isinstance(value, str) else describe_type(value)
            )
            return [str(value) for value in values]
        case np.ndarray() | np.generic() | bool() | int() | float():
            return _stack_arrays(values, path)
        case None:
            _check_alike(values, path, describe_type)
            return None
        case Mapping():
            _check_alike(values, path, _mapping_kind)
            return {key: _stack([value[key] for value in values], f"{path}[{key!r}]") for key in first}
        case list() if _is_array(first):
            return _stack_arrays(values, path)
        case tuple() | list():
            _check_alike(values, path, _sequence_kind)
            parts = [_stack([value[i] for value in values], f"{path}[{i}]") for i in range(len(first))]
            return tuple(parts) if isinstance(first, tuple) else parts
    if is_dataclass(first) and not isinstance(first, type):
        _check_alike(values, path, describe_type)
        names = [field.name for field in fields(first)]
        return {name: _stack([getattr(value, name) for value in values], f"{path}.{name}") for name in names}
    raise TrainingError(
        f"{_field(path)} is {describe_type(first)}, which cannot be stacked to a batch; "
        "return tensors, numpy arrays or numbers from the data set, or give Training.collate"
    )


def _stack_tensors(values: Sequence[Any], path: str) -> Tensor:
    _check_alike(
        values, path, lambda value: "a tensor" if isinstance(value, Tensor) else describe_type(value)
    )
    _check_shapes([tuple(value.shape) for value in values], path)
    return torch.stack([value.detach() for value in values])


def _stack_arrays(values: Sequence[Any], path: str) -> Tensor:
    _check_alike(
        values, path, lambda value: "an array of numbers" if _is_array(value) else describe_type(value)
    )
    arrays = [np.asarray(value) for value in values]
    _check_shapes([array.shape for array in arrays], path)
    array = np.stack(arrays)
    if not _is_known(array.dtype):
        raise TrainingError(f"{_field(path)} is an array of {array.dtype}, which torch does not have")
    return torch.from_numpy(array.astype(_dtype_for_torch(array.dtype), copy=False))


def _is_known(dtype: np.dtype[Any]) -> bool:
    """Return whether torch can hold such values; it has no numbers of 80 or 128 bits."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _dtype_for_torch(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type for torch: perhaps a wider one, and in this machine's order of bytes."""
    return np.dtype(_WIDER.get(dtype.name, dtype.newbyteorder("=")))


def _is_array(value: Any) -> bool:
    """Return whether ``value`` is a number, an array or a (nested, rectangular) list of numbers."""
    if isinstance(value, np.ndarray | bool | int | float | np.bool_ | np.number):
        return True
    if not isinstance(value, list) or not value:
        return isinstance(value, list)
    if isinstance(value[0], list):
        return all(isinstance(v, list) and len(v) == len(value[0]) and _is_array(v) for v in value)
    return all(isinstance(v, bool | int | float | np.bool_ | np.number) for v in value)


def _check_shapes(shapes: Sequence[tuple[int, ...]], path: str) -> None:
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise TrainingError(
                f"{_field(path)} has shape {shapes[0]} in row 0 of the microbatch and {shape} in row "
                f"{number}; {_REMEDY}"
            )


def _check_alike(values: Sequence[Any], path: str, kind: Callable[[Any], str]) -> None:
    wanted = kind(values[0])
    for number, value in enumerate(values):
        if kind(value) != wanted:
            raise TrainingError(
                f"{_field(path)} is {wanted} in row 0 of the microbatch and {kind(value)} in row {number}; "
                "return samples of one structure, or give Training.collate"
            )


def _mapping_kind(value: Any) -> str:
    return (
        f"a dict of {', '.join(sorted(map(repr, value)))}"
        if isinstance(value, Mapping)
        else describe_type(value)
    )


def _sequence_kind(value: Any) -> str:
    return (
        f"{describe_type(value)} of {len(value)}" if isinstance(value, tuple | list) else describe_type(value)
    )


def _field(path: str) -> str:
    return f"sample{path}" if path else "the sample"


def describe_type(value: object) -> str:
    """Return the type of a value with an article, for messages."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"a numpy array of {value.dtype}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# --- checking what a collate function returned -----------------------------------------------------


def check_batch(value: Any) -> Batch:
    """Return the result of a collate function as plain dicts, tuples, lists and CPU tensors.

    Other mappings (such as transformers' ``BatchEncoding``) become dicts, and numpy arrays become tensors.

    :raises TrainingError: it contains something that cannot be a part of a batch, or no tensor at all.
    """
    batch = _checked(value, "")
    if not any(isinstance(leaf, Tensor) for leaf in leaves_of(batch)):
        raise TrainingError(
            f"the collate function returned {_summary(value)}, which contains no tensor; "
            "it must return a tensor, or a tuple or dict of tensors"
        )
    return batch


def _checked(value: Any, path: str) -> Batch:
    match value:
        case Tensor():
            if value.device.type != "cpu":
                raise TrainingError(
                    f"batch{path} is on {value.device}; return CPU tensors from the data set and the collate "
                    "function, as ftd moves the batch to its device"
                )
            if value.layout is not torch.strided:
                raise TrainingError(f"batch{path} is a {value.layout} tensor; make it dense with to_dense()")
            return value.detach().contiguous()
        case np.ndarray() | np.generic() if _is_known(value.dtype):
            if isinstance(value, np.generic):
                return value.item()
            array = np.ascontiguousarray(value, dtype=_dtype_for_torch(value.dtype))
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        case int() if not -(2**63) <= value < 2**63:
            raise TrainingError(f"batch{path} is {value}, which has more than 64 bits")
        case bool() | int() | float() | str() | None:
            return value
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise TrainingError(f"batch{path} has the key {key!r}; keys of a batch must be strings")
            return {key: _checked(item, f"{path}[{key!r}]") for key, item in value.items()}
        case tuple():
            return tuple(_checked(item, f"{path}[{i}]") for i, item in enumerate(value))
        case list():
            return [_checked(item, f"{path}[{i}]") for i, item in enumerate(value)]
    raise TrainingError(
        f"batch{path}, as the collate function returned it, is {describe_type(value)}; a batch consists of "
        "tensors, numbers, strings and None in dicts, tuples and lists"
    )


def _summary(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{describe_type(value)} with {', '.join(map(repr, value)) or 'no keys'}"
    return _sequence_kind(value)


# --- using batches -----------------------------------------------------------------------------------


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch of the same structure with ``function`` applied to every tensor."""
    match batch:
        case Tensor():
            return function(batch)
        case dict():
            return {key: map_tensors(function, item) for key, item in batch.items()}
        case tuple():
            return _tuple_like(batch, [map_tensors(function, item) for item in batch])
        case list():
            return [map_tensors(function, item) for item in batch]
        case _:
            return batch


def _tuple_like(one: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return the items as a tuple of the same type: a model's output may be a named one."""
    return type(one)(*items) if hasattr(one, "_fields") else tuple(items)


def leaves_of(batch: Batch) -> Iterator[Any]:
    """Yield every leaf, in the order of the structure."""
    match batch:
        case dict():
            for item in batch.values():
                yield from leaves_of(item)
        case tuple() | list():
            for item in batch:
                yield from leaves_of(item)
        case _:
            yield batch


def count_rows(batch: Batch, rows: int | None = None) -> int:
    """Return the size of dim 0 of the first tensor that has dimensions, or ``rows`` if any tensor has that size: a
    batch may begin with a tensor that has no rows, such as a mask of positions.

    :param rows: number of samples in the batch, which may be packed to fewer rows.
    :raises TrainingError: no tensor has dimensions.
    """
    sizes = [len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if sizes:
        return rows if rows is not None and rows in sizes else sizes[0]
    raise TrainingError("no tensor of the batch has a dimension for the rows")


def slice_rows(batch: Batch, start: int, end: int, rows: int) -> Batch:
    """Return rows ``[start, end)`` of a batch of ``rows`` rows, as views.

    Every tensor whose dim 0 is ``rows`` is sliced, and so is every list of ``rows`` strings. A value
    without rows (a number, a mask of positions) stays as it is.

    :raises TrainingError: some of the rows are requested, and no tensor has rows in dim 0.
    """
    if (start, end) == (0, rows):
        return batch
    if not any(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows for leaf in leaves_of(batch)):
        raise TrainingError(
            f"no tensor of the batch has the microbatch's {rows} rows in dim 0, so it cannot be split among "
            "the devices of a stage; let the collate function return one row per sample, or give each stage "
            "one device"
        )
    return _slice(batch, start, end, rows)


def _slice(batch: Batch, start: int, end: int, rows: int) -> Batch:
    match batch:
        case Tensor():
            return batch[start:end] if batch.dim() and len(batch) == rows else batch
        case list() if len(batch) == rows and all(isinstance(item, str) for item in batch):
            return batch[start:end]
        case dict():
            return {key: _slice(item, start, end, rows) for key, item in batch.items()}
        case tuple():
            return _tuple_like(batch, [_slice(item, start, end, rows) for item in batch])
        case list():
            return [_slice(item, start, end, rows) for item in batch]
        case _:
            return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors to ``device``. Copies from pinned memory are asynchronous."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), batch)


def cast_floating(batch: Batch, dtype: torch.dtype) -> Batch:
    """Convert floating-point tensors to ``dtype``; integers, booleans and complex numbers stay."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def first_difference(one: Batch, other: Batch) -> str | None:
    """Return where two batches differ, as ``['labels'][0]``; ``None`` if they are equal bit for bit."""
    if type(one) is not type(other):
        return ""
    match one:
        case Tensor():
            equal = one.dtype == other.dtype and one.shape == other.shape
            return None if equal and torch.equal(flat_bytes(one), flat_bytes(other)) else ""
        case float() if math.isnan(one) and math.isnan(other):
            return None
        case dict() if one.keys() == other.keys():
            parts = [(f"[{key!r}]", item, other[key]) for key, item in one.items()]
        case tuple() | list() if len(one) == len(other):
            parts = [(f"[{i}]", item, other[i]) for i, item in enumerate(one)]
        case _:
            return None if one == other else ""
    for path, item, its_other in parts:
        below = first_difference(item, its_other)
        if below is not None:
            return path + below
    return None


def signature(batch: Batch, rows: int | None = None) -> Hashable:
    """Return a key that is equal for batches of equal structure, types and shapes, except for the number of
    rows.

    Only the types of numbers, strings and ``None`` count.

    :param rows: see ``count_rows``.
    """
    return _signature(batch, count_rows(batch, rows))


def _signature(batch: Batch, rows: int) -> Hashable:
    match batch:
        case Tensor():
            per_row = bool(batch.dim()) and len(batch) == rows
            return ("rows" if per_row else "whole", str(batch.dtype), tuple(batch.shape[per_row:]))
        case dict():
            return ("dict", tuple((key, _signature(item, rows)) for key, item in batch.items()))
        case list() if len(batch) == rows and all(isinstance(item, str) for item in batch):
            return "strings"
        case tuple() | list():
            return (type(batch).__name__, tuple(_signature(item, rows) for item in batch))
        case _:
            return type(batch).__name__
