"""Checks ``[data]`` and ``[evaluation]`` of a job file without torch, and makes every path absolute."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from ftd.config.error_collector import ErrorCollector
from ftd.config.models import model_directory
from ftd.config.validation import expand_path, input_path
from ftd.errors import ConfigurationError, IncompleteError
from runtime.sources.errors import DataError, find_files
from runtime.wire.recipe import BYTES, DataTable, EvaluationTable, ModelTable, Task

_KINDS = {"tokens": "token file", "text": "text file", "instructions": "file of instructions"}
_SOURCES = (*_KINDS, "megatron", "images", "huggingface")
_SOURCES_OF_KEY = {
    "dtype": ("tokens",),
    "field": ("text",),
    "packing": ("text",),
    "end_of_text": ("text",),
    "cache": ("text", "instructions"),
    "length": ("tokens", "text", "instructions", "megatron"),
}
"""Keys that apply to some sources only, and those sources."""
_LANGUAGE: tuple[Task, ...] = ("causal-lm", "masked-lm")
_TASKS_OF: dict[str, tuple[Task, ...]] = {
    "tokens": _LANGUAGE,
    "text": _LANGUAGE,
    "instructions": ("causal-lm",),
    "megatron": _LANGUAGE,
    "images": ("image-classification",),
    "huggingface": get_args(Task),
}
_BITS = re.compile(r"u?int(\d+)")
DEFAULT_FRACTION = 0.01


def resolve_data(
    table: DataTable, model: ModelTable, directory: Path, collector: ErrorCollector, where: str = "data"
) -> DataTable:
    """Return the table with absolute paths and the tokenizer to use.

    :param model: the model's table with resolved paths.
    :param directory: directory of the job file.
    :param where: name of the table in the file.
    """
    chosen = [name for name in _SOURCES if getattr(table, name) is not None]
    if len(chosen) != 1:
        collector.add(_no_single_source(chosen, where))
        return table
    [source] = chosen
    _reject_inapplicable_keys(table, source, where, collector)
    changes: dict[str, str | list[str]] = {}
    with collector.collect():
        changes[source] = _resolved_source(table, source, directory, f"{where}.{source}")
    with collector.collect():
        _check_task(table, source, model.task, where)
        tokenizer = _resolved_tokenizer(table, model, directory, f"{where}.tokenizer")
        if tokenizer is None and (
            source in ("text", "instructions") or _collate_of(table, model.task) != "auto"
        ):
            raise IncompleteError(
                "this data needs a tokenizer, and the model comes without one",
                field=f"{where}.tokenizer",
                remedy='write tokenizer = "DIRECTORY", or tokenizer = "bytes" for one token per byte',
            )
        if tokenizer is not None:
            changes["tokenizer"] = tokenizer
    if table.cache is not None:
        with collector.collect():
            changes["cache"] = str(expand_path(table.cache, directory, f"{where}.cache"))
    return msgspec.structs.replace(table, **changes)


def resolve_evaluation(
    table: EvaluationTable, model: ModelTable, directory: Path, collector: ErrorCollector
) -> EvaluationTable:
    """Return the table with its held-out data resolved: a share of the training data, or separate data."""
    if table.every_steps == 0:
        return table
    if table.data is None:
        return msgspec.structs.replace(table, fraction=table.fraction or DEFAULT_FRACTION)
    if table.fraction is not None:
        collector.reject(
            "fraction and [evaluation.data] exclude each other",
            field="evaluation.fraction",
            remedy="keep one of them",
        )
    data = resolve_data(table.data, model, directory, collector, "evaluation.data")
    return msgspec.structs.replace(table, data=data)


def check_evaluation(table: EvaluationTable) -> None:
    """Check that the table says when to evaluate.

    :raises ConfigurationError: it does not.
    """
    if table != EvaluationTable() and table.every_steps == 0:
        raise IncompleteError(
            "the table [evaluation] does not say when to evaluate",
            field="evaluation.every_steps",
            remedy="write for example every_steps = 100, or remove [evaluation]",
        )


def _no_single_source(chosen: Sequence[str], where: str) -> ConfigurationError:
    if chosen:
        return ConfigurationError(
            f"{' and '.join(chosen)} exclude each other",
            field=f"{where}.{chosen[1]}",
            remedy="keep one of them",
        )
    return IncompleteError(
        "the table names no data",
        field=f"{where}.text",
        remedy=f"write one of {', '.join(_SOURCES)}",
    )


def _reject_inapplicable_keys(table: DataTable, source: str, where: str, collector: ErrorCollector) -> None:
    defaults = DataTable()
    for key, sources in _SOURCES_OF_KEY.items():
        if source not in sources and getattr(table, key) != getattr(defaults, key):
            problem = f"it does not apply to {source}, only to {' and '.join(sources)}"
            collector.reject(problem, field=f"{where}.{key}", remedy=f"remove {key}")


def _resolved_source(table: DataTable, source: str, directory: Path, field: str) -> str | list[str]:
    """Return the source with absolute paths.

    :raises ConfigurationError: files are missing, or are not what they should be.
    """
    match source:
        case "tokens" | "text" | "instructions":
            written = getattr(table, source)
            named = [written] if isinstance(written, str) else list(written)
            patterns = [_path_or_pattern(one, directory, field) for one in named]
            try:
                files = find_files(patterns, _KINDS[source])
            except DataError as error:
                raise ConfigurationError(
                    str(error), field=field, remedy="paths are relative to the job file"
                ) from None
            if source == "tokens":
                _check_token_files(files, table, field)
            return patterns
        case "megatron":
            prefix = input_path(str(table.megatron), directory, field)
            for ending in (".idx", ".bin"):
                if not Path(f"{prefix}{ending}").is_file():
                    raise ConfigurationError(
                        f"{prefix}{ending} does not exist",
                        field=field,
                        remedy="write the common path of the .bin and .idx files without the ending",
                    )
            return str(prefix)
        case "images":
            path = input_path(str(table.images), directory, field)
            if path.is_dir():
                raise ConfigurationError(
                    f"{path} is a directory, not a file",
                    field=field,
                    remedy="name a .npz file with the arrays images and labels",
                )
            if not path.is_file():
                raise ConfigurationError(
                    f"{path} does not exist", field=field, remedy="the path is relative to the job file"
                )
            return str(path)
        case _:
            return str(_saved_dataset(input_path(str(table.huggingface), directory, field), field))


def _path_or_pattern(written: str, directory: Path, field: str) -> str:
    """Return a path or a pattern that is absolute; in a pattern, the job file's directory stands for itself.

    :raises ConfigurationError: see ``input_path``.
    """
    path = input_path(written, directory, field)
    if glob.has_magic(written) and not path.exists():
        path = expand_path(written, Path(glob.escape(str(directory.resolve()))), field)
    return str(path)


def _check_token_files(files: Sequence[Path], table: DataTable, field: str) -> None:
    """Check that the sizes of token files fit the type of the ids.

    :raises ConfigurationError: a file's size is not a multiple of the size of an id.
    """
    if table.dtype is None:
        return
    item = int(_BITS.sub(r"\1", table.dtype)) // 8
    for path in files:
        size = path.stat().st_size
        if path.suffix != ".npy" and size % item:
            raise ConfigurationError(
                f"{path} has {size} bytes, which is not a multiple of {item}, the size of {table.dtype}",
                field=field,
                remedy="set dtype to the type of the ids in the file",
            )


def _saved_dataset(place: Path, field: str) -> Path:
    """Check that a directory is a saved data set.

    :raises ConfigurationError: ``save_to_disk`` did not write this directory, or it has several splits.
    """
    if input_path("dataset_dict.json", place, field).is_file():
        splits = sorted(path.name for path in place.iterdir() if path.is_dir())
        raise ConfigurationError(
            f"{place} has several splits",
            field=field,
            remedy=f"name one of them: {', '.join(str(place / split) for split in splits)}",
        )
    if not input_path("state.json", place, field).is_file():
        raise ConfigurationError(
            f"{place} is not a saved data set",
            field=field,
            remedy="name the directory that datasets.Dataset.save_to_disk wrote, relative to the job file",
        )
    return place


def _resolved_tokenizer(table: DataTable, model: ModelTable, directory: Path, field: str) -> str | None:
    """Return the tokenizer's directory or file, ``bytes``, or None if there is no tokenizer.

    :raises ConfigurationError: the named directory has none.
    """
    if table.tokenizer == BYTES:
        return BYTES
    if table.tokenizer is None:
        place = None if model.huggingface is None else Path(model.huggingface)
        return str(place) if place is not None and _has_tokenizer(place) else None
    file = input_path(table.tokenizer, directory, field)
    if file.is_file():
        return str(file)
    place = model_directory(table.tokenizer, directory, field)
    if not _has_tokenizer(place):
        raise ConfigurationError(
            f"{place} has no tokenizer.json",
            field=field,
            remedy='name the directory that a tokenizer\'s save_pretrained wrote, or "bytes"',
        )
    return str(place)


def _has_tokenizer(place: Path) -> bool:
    try:
        return (place / "tokenizer.json").is_file()
    except OSError:  # The directory cannot be entered.
        return False


def _collate_of(table: DataTable, task: Task | None) -> str:
    """Return how samples become a batch, as far as the file says it; ``auto`` also if no padding is needed."""
    return "masked-lm" if table.collate == "auto" and task == "masked-lm" else table.collate


def _check_task(table: DataTable, source: str, task: Task | None, where: str) -> None:
    """Check that the data suits the task of the model.

    :raises ConfigurationError: it does not.
    """
    if task is not None and task != "masked-lm" and table.collate == "masked-lm":
        raise ConfigurationError(
            f"masking is for the task masked-lm, but the task of this model is {task}",
            field=f"{where}.collate",
            remedy="remove collate",
        )
    if task == "masked-lm" and table.collate == "pad" and source != "huggingface":
        raise ConfigurationError(
            "a masked language model has nothing to predict without masks",
            field=f"{where}.collate",
            remedy="remove collate",
        )
    if task is not None and task not in _TASKS_OF[source]:
        suitable = [name for name in _SOURCES if task in _TASKS_OF[name]]
        raise ConfigurationError(
            f"{source} cannot be used for the task {task}",
            field=f"{where}.{source}",
            remedy=f"use one of {', '.join(suitable)}",
        )
