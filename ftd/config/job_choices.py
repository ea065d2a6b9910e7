"""Turns the choices of a user of ``ftd init`` into the tables of a job file."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ftd.config.models import model_directory
from ftd.config.validation import input_path
from ftd.errors import ConfigurationError
from runtime.sources.documents import is_table, read_records
from runtime.sources.errors import DataError, find_files

Tables = dict[str, Any]

DEFAULT_STEPS = 1000
DEFAULT_SIZE = "small"
_SHAPES = {"tiny": (128, 4, 4), "small": (384, 8, 6), "medium": (768, 12, 12), "large": (1024, 24, 16)}
"""Hidden size, layers and attention heads of each size."""
SIZES = tuple(_SHAPES)
_GATED = ("gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
"""Architectures with three matrices per feed-forward network and separate key-value heads."""
_PLAIN = ("bert", "electra", "gpt_neox", "roberta", "vit")
"""Architectures with an ``intermediate_size`` of usually four times the hidden size."""
_ARCHITECTURE = re.compile(r"[a-z][a-z0-9_-]*")
_MICROBATCH = 4
_USUAL_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChoices:
    """Choices of the user; ``None`` keeps the default."""

    name: str
    steps: int = DEFAULT_STEPS
    function: str | None = None
    model: Tables | None = None
    data: Tables | None = None
    length: int | None = None
    precision: str | None = None
    backend: str | None = None
    learning_rate: float | None = None
    evaluate_every_steps: int | None = None
    nodes: int = 2
    devices_per_node: int = 1


def build_tables(choices: JobChoices) -> Tables:
    """Return the tables of a job file without values that equal their defaults."""
    devices = choices.nodes * choices.devices_per_node
    batch = _MICROBATCH * devices if devices > _USUAL_MICROBATCHES else None
    data = dict(choices.data or {})
    if choices.length is not None:
        data["length"] = choices.length
    return {
        "name": choices.name,
        "steps": choices.steps,
        "model": choices.model or {},
        "data": data,
        "training": _given(
            function=choices.function,
            global_batch=batch,
            precision=choices.precision,
            backend=choices.backend,
        ),
        "optimizer": _given(learning_rate=choices.learning_rate),
        "evaluation": _given(every_steps=choices.evaluate_every_steps),
        "tolerance": _given(failures=0 if choices.nodes == 1 else None),
    }


def model_table(written: str, size: str, job_directory: Path) -> Tables:
    """Return ``[model]`` for a directory, a name in the local Hugging Face cache, or an architecture.

    :param size: size of a model that is built from an architecture alone.
    :param job_directory: directory of the job file.
    :raises ConfigurationError: ``written`` is none of these.
    """
    try:
        place = model_directory(written, Path.cwd(), "--model")
    except ConfigurationError:
        if not _ARCHITECTURE.fullmatch(written):
            raise
        return {"architecture": written, "overrides": _sizes(written, size)}
    named = place == (Path.cwd() / Path(written).expanduser()).resolve()
    return {"huggingface": path_relative_to(written, job_directory) if named else written}


def data_table(written: Sequence[str], field: str | None, job_directory: Path) -> Tables:
    """Return ``[data]`` for files or a directory, with the kind recognised by names and content.

    :raises ConfigurationError: there are no files, or their kind is not clear.
    """
    [first, *others] = written
    paths: str | list[str] = (
        [path_relative_to(one, job_directory) for one in written]
        if others
        else path_relative_to(first, job_directory)
    )
    place, *_ = [input_path(one, Path.cwd(), "--data") for one in written]
    prefix = re.sub(r"\.(bin|idx)$", "", first)
    if Path(re.sub(r"\.(bin|idx)$", "", str(place)) + ".idx").is_file():
        _require_alone(others, f"the Megatron data {prefix}")
        return {"megatron": path_relative_to(prefix, job_directory)}
    saved = [input_path(name, place, "--data") for name in ("state.json", "dataset_dict.json")]
    if place.is_dir() and any(path.is_file() for path in saved):
        _require_alone(others, f"the saved data set {first}")
        return {"huggingface": paths}
    try:
        files = find_files([os.path.expandvars(one) for one in written], "file of data")
        suffix = files[0].suffix
        if suffix == ".npz":
            _require_alone(others, f"the file of images {first}")
            return {"images": paths}
        if suffix in (".bin", ".npy"):
            return {"tokens": paths}
        return _text_table(files[0], paths, field)
    except DataError as error:
        raise ConfigurationError(str(error), field="--data") from None


def _require_alone(others: Sequence[str], what: str) -> None:
    """Check that the only data is of a kind of which a job reads one.

    :raises ConfigurationError: there is more.
    """
    if others:
        raise ConfigurationError(
            f"{what} cannot be read together with {', '.join(others)}",
            field="--data",
            remedy="give --data once",
        )


def image_overrides(images: Path, model: Tables) -> Tables:
    """Return the values of the model's configuration that follow from its images; nothing if the file is
    corrupt.
    """
    try:
        with np.load(images, allow_pickle=False) as arrays:
            shape, classes = arrays["images"].shape, int(arrays["labels"].max()) + 1
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return {}
    size = {"image_size": shape[1], "num_channels": shape[3] if len(shape) == 4 else 1}
    return {"num_labels": classes} | (size if "architecture" in model else {})


def path_relative_to(written: str, job_directory: Path) -> str:
    """Return a path that is relative to this process's directory as one that is relative to ``job_directory``."""
    if Path(written).is_absolute() or written.startswith(("~", "$")):
        return written
    return os.path.relpath(Path.cwd() / written, job_directory.resolve())


def _text_table(first: Path, paths: str | list[str], field: str | None) -> Tables:
    """Return ``[data]`` for files of text or records.

    :raises ConfigurationError: it is not clear which field has the text.
    :raises DataError: a file has no records.
    """
    if not is_table(first):
        return {"text": paths}
    _, record = next(iter(read_records(first)), ("", {}))
    if field is None and ("messages" in record or {"prompt", "completion"} <= record.keys()):
        return {"instructions": paths}
    texts = [name for name, value in record.items() if isinstance(value, str)]
    if field is None and "text" not in texts and len(texts) != 1:
        raise ConfigurationError(
            f"it is not clear which field of {first} has the text: {', '.join(record) or 'it has no fields'}",
            field="--field",
            remedy="name the field with --field",
        )
    chosen = field or ("text" if "text" in texts else texts[0])
    return {"text": paths} if chosen == "text" else {"text": paths, "field": chosen}


def _sizes(architecture: str, size: str) -> Tables:
    hidden, layers, heads = _SHAPES[size]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    if architecture in _GATED:
        sizes |= {"intermediate_size": -(-hidden * 8 // 3 // 64) * 64, "num_key_value_heads": heads}
    elif architecture in _PLAIN:
        sizes |= {"intermediate_size": 4 * hidden}
    return sizes


def _given(**values: Any) -> Tables:
    return {name: value for name, value in values.items() if value is not None}
