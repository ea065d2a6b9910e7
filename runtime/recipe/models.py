"""Hugging Face models of a job file: configuration, weights and adapters."""

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.errors import TrainingError
from runtime.pretrained import PretrainedWeights
from runtime.sources.errors import import_package
from runtime.sources.tokenizer import LoadedTokenizer
from runtime.wire.recipe import LoraTable, ModelTable, Task, merge_tables

_CLASSES: dict[Task, str] = {
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
}
"""Classes of transformers by task. The usual task of an architecture is the first of those that it has."""
_PADDING_POSITIONS: dict[str, int | None] = {
    **dict.fromkeys(("camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "roberta")),
    **dict.fromkeys(("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")),
    "mpnet": 1,
}
"""Architectures that number positions from the one after padding, and the position of padding; None: that of the
padding token's id.
"""
_CLASSIFICATION = ("image-classification", "sequence-classification")


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """A function that makes the model of a job file."""

    table: ModelTable
    config: Any
    """The model's ``PreTrainedConfig``, with overrides applied."""
    task: Task
    kind: Any
    """The model's class."""

    @property
    def directory(self) -> Path | None:
        """Directory with the weights from which training starts; None for random weights."""
        if self.table.huggingface is None or self.table.weights == "random":
            return None
        place = Path(self.table.huggingface)
        started = self.table.weights == "required" or any(place.glob("*.safetensors"))
        return place if started else None

    @property
    def exact(self) -> bool:
        """Whether random weights are drawn one after the other; a model from files does not need most of them."""
        return self.directory is None

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids of the model; None if it takes no tokens."""
        size: int | None = getattr(self.config.get_text_config(), "vocab_size", None)
        return size

    @property
    def classes(self) -> int | None:
        """Number of classes of a classifier; None for other models, for several labels per sample, and for
        regression.
        """
        one_class = getattr(self.config, "problem_type", None) in (None, "single_label_classification")
        count: int = self.config.num_labels
        return count if self.task in _CLASSIFICATION and one_class and count > 1 else None

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of a sample; None if the architecture has no limit."""
        config = self.config.get_text_config()
        positions: int | None = getattr(config, "max_position_embeddings", None)
        if positions is None or positions < 0:  # XLNet has -1.
            return None
        padding = _PADDING_POSITIONS.get(config.model_type, -1)
        if padding is None:
            padding = -1 if config.pad_token_id is None else config.pad_token_id
        return max(0, positions - 1 - padding)

    def __call__(self) -> nn.Module:
        """Make the model with the weights that training starts from.

        :raises TrainingError: the weights do not fit the model, or transformers cannot make it.
        """
        model = self.build()
        if (weights := self.weights(model)) is not None:
            weights.load_into(model.state_dict())
        return model

    def build(self) -> nn.Module:
        """Make the model with random weights.

        :raises TrainingError: transformers cannot make it.
        """
        kind = _auto_class(self.task)
        try:
            model = kind.from_config(
                self.config, dtype=torch.float32, attn_implementation=self.table.attention
            )
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
            raise TrainingError(
                f"making the {self.config.model_type} model raised {type(error).__name__}: {error}"
            ) from error
        if self.table.lora is not None:
            _add_adapters(model, self.table.lora, self.task)
        made: nn.Module = model
        return made

    def weights(self, model: nn.Module) -> PretrainedWeights | None:
        """Return the weights from which ``model`` starts; None for random ones.

        The head of a classifier, with its pooler, is initialised at random if the files have none, or one
        for another number of classes.

        :raises TrainingError: files are missing, or do not fit the model; the message lists all tensors.
        """
        if self.directory is None:
            return None
        new = self.table.new
        try:
            return PretrainedWeights(self.directory, model, new=new)
        except TrainingError:
            if self.task not in _CLASSIFICATION:
                raise
            heads = [f"{head}.*" for head in _heads(model)]
            return PretrainedWeights(self.directory, model, new=[*new, *heads, "*.pooler.*"])


def load_model(table: ModelTable, tokenizer: LoadedTokenizer | None) -> HuggingFaceModel:
    """Return the function that makes the model of a job file; no weights are read yet.

    :raises TrainingError: its configuration cannot be used, or transformers has no such model for the task.
    """
    config = load_config(table, tokenizer)
    task = task_of(table, config)
    return HuggingFaceModel(table=table, config=config, task=task, kind=_model_class(config, task))


def load_config(table: ModelTable, tokenizer: LoadedTokenizer | None) -> Any:
    """Return the configuration of the model with the job's overrides.

    A model that is given by its architecture alone gets the vocabulary and the special tokens of its
    tokenizer.

    :raises TrainingError: it cannot be read, is of a quantised model, or an override is unknown.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # Trainers must not wait for a network.
    if table.huggingface is None:
        kind = _config_class(str(table.architecture))
        values: dict[str, Any] = {} if tokenizer is None else _of_tokenizer(kind(), tokenizer)
    else:
        values = _read_config(Path(table.huggingface))
        kind = _config_class(values["model_type"])
    _check_overrides(kind(), table.overrides)
    names = kind.attribute_map
    values, overrides = ({names.get(n, n): v for n, v in one.items()} for one in (values, table.overrides))
    try:
        config = kind(**merge_tables(values, overrides))
    except Exception as error:
        field = "model.overrides" if overrides else f"the configuration in {table.huggingface}"
        raise TrainingError(f"{field}: transformers rejects it for {kind.model_type}: {error}") from error
    config.use_cache = False
    # As with from_pretrained: checkpoints find the tokenizer's files there, and adapters their base model.
    config._name_or_path = table.huggingface or ""
    return config


def _config_class(model_type: str) -> Any:
    """Return the configuration class of an architecture.

    :raises TrainingError: transformers does not know the architecture.
    """
    transformers = import_package("transformers", "[model]")
    try:
        return transformers.CONFIG_MAPPING[model_type]
    except KeyError as error:
        close = difflib.get_close_matches(model_type, list(transformers.CONFIG_MAPPING.keys()), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TrainingError(
            f"transformers {transformers.__version__} has no architecture {model_type!r}{hint}"
        ) from error


def _read_config(place: Path) -> dict[str, Any]:
    """Return the values of ``config.json``.

    :raises TrainingError: this host has no configuration there, or one that cannot be trained.
    """
    path = place / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config["model_type"]
    except FileNotFoundError as error:
        raise TrainingError(
            f"{path} does not exist on this host; copy the model to the same path on every node"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} cannot be read: {error!r}") from error
    if config.get("quantization_config") is not None:
        raise TrainingError(
            f"the model in {place} is quantised, and quantised weights cannot be trained; "
            "name the directory of the model in full precision"
        )
    return config


def _check_overrides(default: Any, overrides: dict[str, Any]) -> None:
    """:raises TrainingError: the configuration has no such value."""
    unknown = [n for n in overrides if not hasattr(default, n) and not n.endswith("_token_id")]
    if unknown:
        known = sorted({*default.to_dict(), *type(default).attribute_map})
        close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
        raise TrainingError(
            f"model.overrides: the configuration of {default.model_type} has no {', '.join(unknown)}; {hint}"
        )


def task_of(table: ModelTable, config: Any) -> Task:
    """Return the task of the model: the job's, or the usual one of the architecture.

    :raises TrainingError: the architecture has none of the known tasks.
    """
    if table.task is not None:
        return table.task
    for task in _CLASSES:
        if type(config) in _auto_class(task)._model_mapping:
            return task
    raise TrainingError(
        f"{config.model_type} has none of the tasks that a job file knows; write a training function for it"
    )


def _of_tokenizer(config: Any, tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """Return the values of a new configuration that depend on its tokenizer."""
    values = {
        "vocab_size": tokenizer.vocabulary_size,
        "bos_token_id": tokenizer.end_of_text_id,
        "eos_token_id": tokenizer.end_of_text_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {name: value for name, value in values.items() if hasattr(config, name)}


def _auto_class(task: Task) -> Any:
    return getattr(import_package("transformers", "[model]"), _CLASSES[task])


def _model_class(config: Any, task: Task) -> Any:
    """Return the model's class.

    :raises TrainingError: transformers has no such model for the task.
    """
    try:
        kinds = _auto_class(task)._model_mapping[type(config)]
    except KeyError as error:
        raise TrainingError(
            f"transformers has no {config.model_type} for the task {task} ({_CLASSES[task]}); "
            "write another task under [model]"
        ) from error
    return kinds[0] if isinstance(kinds, tuple) else kinds


def _add_adapters(model: Any, table: LoraTable, task: Task) -> None:
    """Freeze the model and add trainable adapters to its linear modules.

    :raises TrainingError: there are no modules with these names.
    """
    peft = import_package("peft", "[model.lora]")
    config = peft.LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,
        lora_dropout=table.dropout,
        target_modules=table.target_modules,
        modules_to_save=_heads(model) if task in _CLASSIFICATION else None,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        raise TrainingError(
            f"model.lora.target_modules: {error}; the model's linear modules are {', '.join(sorted(linear))}"
        ) from error


def _heads(model: Any) -> list[str]:
    """Return the names of the modules outside the base model."""
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]
