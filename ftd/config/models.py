"""``[model]`` of a job file: checked without torch and transformers, and its directory found.

Names of files and ``config.json`` are read here; whether the weights fit the model is checked by the
trainers, which have transformers.
"""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from ftd.config.error_collector import ErrorCollector
from ftd.config.validation import expand_path
from ftd.errors import ConfigurationError, IncompleteError
from runtime.wire.recipe import ModelTable, Task

_TASKS: dict[str, Task] = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "sequence-classification",
}
"""Endings of the class names in a configuration's ``architectures``."""

_ELSEWHERE = {
    "dtype": 'write precision = "bfloat16", say, under [training]',
    "torch_dtype": 'write precision = "bfloat16", say, under [training]',
    "device_map": "leave it out: ftd places the layers on the nodes' devices",
    "quantization_config": "train the model in its full precision: leave it out",
    "attn_implementation": 'write attention = "sdpa" or "eager" under [model]',
}
"""Overrides that are no values of a configuration, or that ftd decides."""

_LARGEST_CONFIG_BYTES = 16 * 1024 * 1024


def resolve_model(table: ModelTable, directory: Path, mistakes: ErrorCollector) -> ModelTable:
    """Return the table with the model's absolute directory, and its task where the configuration names it.

    :param directory: of the job file.
    """
    for name, remedy in _ELSEWHERE.items():
        if name in table.overrides:
            problem = f"{name} cannot be replaced here"
            mistakes.add(ConfigurationError(problem, field="model.overrides", remedy=remedy))
    return mistakes.value_or(lambda: _resolved(table, directory), table)


def _resolved(table: ModelTable, directory: Path) -> ModelTable:
    """:raises ConfigurationError: it is not clear which model is meant, or it cannot be trained."""
    _check_one_origin(table)
    if table.huggingface is None:
        return _without_directory(table)
    place = model_directory(table.huggingface, directory)
    config = _read_config(place)
    _check_weights(table, place)
    return msgspec.structs.replace(
        table, huggingface=str(place), task=table.task or task_of(config.get("architectures"))
    )


def task_of(architectures: Any) -> Task | None:
    """Return the task of the first class that a configuration names; None for one that is not known."""
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(named, str):
        return None
    return next((task for ending, task in _TASKS.items() if named.endswith(ending)), None)


def model_directory(written: str, directory: Path, field: str = "model.huggingface") -> Path:
    """Return the directory that is meant: relative to the job file, or in the local Hugging Face cache.

    :raises ConfigurationError: neither has it.
    """
    place = expand_path(written, directory, field)
    if place.is_dir():
        return place.resolve()
    cache = _hub_cache()
    entry = cache / f"models--{written.replace('/', '--')}"
    try:
        return (entry / "snapshots" / (entry / "refs" / "main").read_text().strip()).resolve(strict=True)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{place} is no directory, and {cache} has no model {written!r}",
            field=field,
            remedy=f"the path is relative to the job file; to download a model: hf download {written}",
        ) from None


def _hub_cache() -> Path:
    """Return the directory in which huggingface_hub keeps models on this machine."""
    variables = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    if named := next((value for name in variables if (value := os.environ.get(name))), None):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(home).expanduser() / "hub"


def _check_one_origin(table: ModelTable) -> None:
    """:raises ConfigurationError: there is not exactly one of ``huggingface`` and ``architecture``."""
    if table.huggingface is None and table.architecture is None:
        raise IncompleteError(
            "the table does not say which model",
            field="model.huggingface",
            remedy='write huggingface = "directory", or architecture = "llama" and [model.overrides]',
        )
    if table.huggingface is not None and table.architecture is not None:
        raise ConfigurationError(
            "the directory's configuration has the architecture already",
            field="model.architecture",
            remedy="leave out architecture or huggingface",
        )


def _without_directory(table: ModelTable) -> ModelTable:
    """:raises ConfigurationError: a model that is made of sizes alone has no weights."""
    if table.weights == "required":
        raise ConfigurationError(
            "a model of an architecture alone has no weights to start from",
            field="model.weights",
            remedy='write huggingface = "directory" in place of architecture, or leave weights out',
        )
    if table.lora is not None and table.weights != "random":
        raise ConfigurationError(
            "LoRA adapts a trained model, and this one has no weights",
            field="model.lora",
            remedy='write huggingface = "directory", or weights = "random" to do it anyway',
        )
    return table


def _read_config(place: Path) -> dict[str, Any]:
    """:raises ConfigurationError: there is none, it is damaged, or of a model that cannot be trained."""
    path = place / "config.json"
    field = "model.huggingface"
    try:
        if path.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise ConfigurationError(f"{path} is too large for a configuration", field=field)
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{place} has no config.json", field=field, remedy="name the directory that save_pretrained wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", field=field) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigurationError(
            f"{path} names no model_type", field=field, remedy="name the directory that save_pretrained wrote"
        )
    if config.get("quantization_config") is not None:
        raise ConfigurationError(
            f"the model in {place} is quantised, and quantised weights cannot be trained",
            field=field,
            remedy="name the directory of the model in full precision",
        )
    return config


def _check_weights(table: ModelTable, place: Path) -> None:
    """:raises ConfigurationError: the weights that are asked for are not there, or are not safetensors."""
    if table.weights == "random":
        return
    missing = [name for name in _indexed(place) if not (place / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{place} lacks files of its weights: {', '.join(missing)}",
            field="model.huggingface",
            remedy='copy them there, or write weights = "random"',
        )
    if any(place.glob("*.safetensors")):
        return
    pickled = sorted(path.name for path in place.glob("pytorch_model*.bin"))
    if pickled:
        raise ConfigurationError(
            f"the weights in {place} are pickled ({pickled[0]})",
            field="model.weights",
            remedy='save the model again as safetensors with save_pretrained, or write weights = "random"',
        )
    if table.weights == "required":
        raise ConfigurationError(
            f"{place} has no *.safetensors",
            field="model.weights",
            remedy='copy them there, or write weights = "random"',
        )
    if table.lora is not None:
        raise ConfigurationError(
            f"LoRA adapts a trained model, and {place} has no *.safetensors",
            field="model.lora",
            remedy='copy them there, or write weights = "random" under [model] to do it anyway',
        )


def _indexed(place: Path) -> list[str]:
    """Return the files that the index of sharded weights names; none where there is no index.

    :raises ConfigurationError: the index is damaged.
    """
    path = place / "model.safetensors.index.json"
    if not path.is_file():
        return []
    try:
        return sorted({str(name) for name in json.loads(path.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no index of safetensors: {error!r}", field="model.huggingface", remedy="copy it again"
        ) from None
