"""Checks ``[model]`` of a job file without torch and transformers, and finds the model's directory.

File names and ``config.json`` are checked here. The trainers, which have transformers, check whether the
weights fit the model.
"""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from ftd.config.error_collector import ErrorCollector
from ftd.config.validation import expand_path, input_path
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
"""Tasks by the ending of the class names in a configuration's ``architectures``."""

_ELSEWHERE = {
    "dtype": 'write for example precision = "bfloat16" under [training]',
    "torch_dtype": 'write for example precision = "bfloat16" under [training]',
    "device_map": "remove it: ftd places the layers on the devices of the nodes",
    "quantization_config": "remove it: models are trained in full precision",
    "attn_implementation": 'write attention = "sdpa" or "eager" under [model]',
}
"""Overrides that are not values of a configuration or that ftd decides, with the remedy."""

_LARGEST_CONFIG_BYTES = 16 * 1024 * 1024


def resolve_model(table: ModelTable, directory: Path, collector: ErrorCollector) -> ModelTable:
    """Return the table with the absolute directory of the model, and the task if the configuration names it.

    :param directory: directory of the job file.
    """
    for name, remedy in _ELSEWHERE.items():
        if name in table.overrides:
            collector.reject(f"{name} cannot be set here", field="model.overrides", remedy=remedy)
    return collector.value_or(lambda: _resolved(table, directory), table)


def _resolved(table: ModelTable, directory: Path) -> ModelTable:
    """Return the table as ``resolve_model`` does.

    :raises ConfigurationError: it is not clear which model is meant, or it cannot be trained.
    """
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
    """Return the task of the first class that a configuration names, or None if the class is not known."""
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(named, str):
        return None
    return next((task for ending, task in _TASKS.items() if named.endswith(ending)), None)


def model_directory(written: str, directory: Path, field: str = "model.huggingface") -> Path:
    """Return the directory of a model: relative to the job file, or in the local Hugging Face cache.

    :raises ConfigurationError: the model is in neither.
    """
    place = input_path(written, directory, field)
    if place.is_dir():
        return place.resolve()
    cache = _hub_cache(field)
    entry = cache / f"models--{written.replace('/', '--')}"
    try:
        return (entry / "snapshots" / (entry / "refs" / "main").read_text().strip()).resolve(strict=True)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{place} is not a directory, and {cache} has no model {written!r}",
            field=field,
            remedy=f"write a path relative to the job file, or download the model: hf download {written}",
        ) from None


def _hub_cache(field: str) -> Path:
    """Return the directory where huggingface_hub keeps models on this machine.

    :raises ConfigurationError: see ``expand_path``.
    """
    variables = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    if named := next((value for name in variables if (value := os.environ.get(name))), None):
        return expand_path(named, Path.cwd(), field)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return expand_path(home, Path.cwd(), field) / "hub"


def _check_one_origin(table: ModelTable) -> None:
    """Check that the table has exactly one of ``huggingface`` and ``architecture``.

    :raises ConfigurationError: the table has neither or both.
    """
    if table.huggingface is None and table.architecture is None:
        raise IncompleteError(
            "the table [model] does not say which model to train",
            field="model.huggingface",
            remedy='write huggingface = "DIRECTORY", or architecture = "llama" with sizes in [model.overrides]',
        )
    if table.huggingface is not None and table.architecture is not None:
        raise ConfigurationError(
            "the configuration in the model's directory already names the architecture",
            field="model.architecture",
            remedy="remove architecture or huggingface",
        )


def _without_directory(table: ModelTable) -> ModelTable:
    """Return the table of a model that is built from sizes alone.

    :raises ConfigurationError: the table needs weights, which such a model does not have.
    """
    if table.weights == "required":
        raise ConfigurationError(
            "a model that is built from an architecture alone has no weights to start from",
            field="model.weights",
            remedy='write huggingface = "DIRECTORY" instead of architecture, or remove weights',
        )
    if table.lora is not None and table.weights != "random":
        raise ConfigurationError(
            "LoRA adapts a trained model, but this model has no weights",
            field="model.lora",
            remedy='write huggingface = "DIRECTORY", or weights = "random" to do it anyway',
        )
    return table


def _read_config(place: Path) -> dict[str, Any]:
    """Return the configuration of the model in a directory.

    :raises ConfigurationError: it is missing or corrupt, or belongs to a model that cannot be trained.
    """
    path = place / "config.json"
    field = "model.huggingface"
    try:
        if path.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise ConfigurationError(
                f"{path} is too large for a configuration", field=field, remedy="is it the right file?"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{place} has no config.json",
            field=field,
            remedy="name a directory that save_pretrained wrote",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}", field=field, remedy="copy the file again"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigurationError(
            f"{path} has no model_type", field=field, remedy="name a directory that save_pretrained wrote"
        )
    if config.get("quantization_config") is not None:
        raise ConfigurationError(
            f"the model in {place} is quantised, and quantised weights cannot be trained",
            field=field,
            remedy="name the directory of the model in full precision",
        )
    return config


def _check_weights(table: ModelTable, place: Path) -> None:
    """Check that the wanted weights are in the directory.

    :raises ConfigurationError: they are not there, or are not safetensors.
    """
    if table.weights == "random":
        return
    missing = [name for name in _indexed(place) if not (place / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"files of the weights are missing in {place}: {', '.join(missing)}",
            field="model.huggingface",
            remedy='copy the files there, or write weights = "random"',
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
            f"{place} has no *.safetensors files",
            field="model.weights",
            remedy='copy the files there, or write weights = "random"',
        )
    if table.lora is not None:
        raise ConfigurationError(
            f"LoRA adapts a trained model, but {place} has no *.safetensors files",
            field="model.lora",
            remedy='copy the files there, or write weights = "random" under [model] to do it anyway',
        )


def _indexed(place: Path) -> list[str]:
    """Return the files that the index of sharded weights names; nothing if there is no index.

    :raises ConfigurationError: the index is corrupt.
    """
    path = place / "model.safetensors.index.json"
    if not path.is_file():
        return []
    try:
        return sorted({str(name) for name in json.loads(path.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not an index of safetensors: {error!r}",
            field="model.huggingface",
            remedy="copy the file again",
        ) from None
