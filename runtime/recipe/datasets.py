"""Data sets and collators of a job file."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from typing import Any

from runtime.recipe.models import HuggingFaceModel
from runtime.recipe.saved_dataset import SavedDataset
from runtime.sources.collators import CausalCollate, MaskedLanguageModelCollate, PadCollate
from runtime.sources.errors import DataError
from runtime.sources.images import ImageArrays
from runtime.sources.instructions import InstructionDataset
from runtime.sources.megatron import MegatronDataset
from runtime.sources.text import TextDataset
from runtime.sources.token_file import TokenFile
from runtime.sources.tokenizer import LoadedTokenizer, load_tokenizer
from runtime.wire.recipe import BYTES, DataTable, EvaluationTable, Recipe

DEFAULT_LENGTH = 1024
"""Tokens of a sample, unless the table or the model asks for fewer."""
_SCANNED_SAMPLES = 1 << 18
"""Token files with at most this many samples are searched for unknown token ids before training."""

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data of a job."""

    training: Any
    held_out: Any | None
    collate: Collate | None
    """Function that makes a batch; None stacks the samples."""


def open_tokenizer(table: DataTable) -> LoadedTokenizer | None:
    """Return the tokenizer of the data; None if the table has none.

    :raises DataError: it cannot be read on this host.
    """
    if table.tokenizer is None:
        return None
    return load_tokenizer(byte_tokenizer() if table.tokenizer == BYTES else table.tokenizer)


def byte_tokenizer() -> str:
    """Return the file of the tokenizer that makes one token of each byte."""
    return str(files("runtime.recipe") / "bytes.json")


def make_data(recipe: Recipe, model: HuggingFaceModel, tokenizer: LoadedTokenizer | None) -> Data:
    """Open the data of a job and its held-out part.

    :raises DataError: files are missing or corrupt, tokens are not in the model's vocabulary, labels are
        missing, or the data is too small.
    """
    dataset = _open(recipe.data, model, "data")
    table, held_out = recipe.evaluation, None
    if table.every_steps and table.data is not None:
        held_out = _open(table.data, model, "evaluation.data")
    elif table.every_steps and table.fraction is not None:
        count = int(len(dataset) * Fraction(table.fraction).limit_denominator(10**6))
        if not count:
            raise DataError(
                f"a share of {table.fraction} of {len(dataset)} samples is no sample; write a larger "
                "evaluation.fraction, or [evaluation.data]"
            )
        dataset, held_out = Split(dataset, count, held_out=False), Split(dataset, count, held_out=True)
    collate = _collate(recipe.data, table, model, tokenizer, dataset[0])
    return Data(training=dataset, held_out=held_out, collate=collate)


class Split:
    """A data set without its held-out samples, or only these. They are evenly spaced over the data set."""

    def __init__(self, dataset: Any, count: int, *, held_out: bool) -> None:
        """Split off ``count`` samples, at most half of them; ``held_out`` chooses the part."""
        self._dataset, self._count, self._held_out = dataset, count, held_out

    def __len__(self) -> int:
        return self._count if self._held_out else len(self._dataset) - self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set with {len(self)} samples")
        if self._held_out:
            return self._dataset[self._held_out_at(index)]
        before = bisect_right(range(self._count), index, key=lambda j: self._held_out_at(j) - j)
        return self._dataset[index + before]

    def _held_out_at(self, number: int) -> int:
        return (2 * number + 1) * len(self._dataset) // (2 * self._count)


class CheckedClasses:
    """Samples of a classifier whose labels are all classes of the model."""

    def __init__(self, dataset: Any, classes: int) -> None:
        """Make a data set that checks each sample when it is read."""
        self._dataset, self._classes = dataset, classes

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        label = sample["labels"]
        if not label.is_floating_point() and not 0 <= int(label.min()) <= int(label.max()) < self._classes:
            raise DataError(
                f"sample {index}: the label {label.tolist()} is not one of the model's {self._classes} classes; "
                "set num_labels in [model.overrides] to the number of classes"
            )
        return sample


def _open(table: DataTable, model: HuggingFaceModel, name: str) -> Any:
    """Return the data set of a table.

    :param name: name of the table in the job file.
    :raises DataError: the files cannot be used with this model.
    """
    longest = model.longest
    length = table.length or (DEFAULT_LENGTH if longest is None else max(1, min(DEFAULT_LENGTH, longest)))
    if longest is not None and length > longest:
        raise DataError(
            f"{name}.length {length} is longer than the {longest} tokens that the model takes; write at "
            "most that, or a larger max_position_embeddings in [model.overrides]"
        )
    dataset: Any
    tokenizer = byte_tokenizer() if table.tokenizer == BYTES else str(table.tokenizer)
    if table.tokens is not None:
        dataset = TokenFile(table.tokens, length=length, dtype=table.dtype)
    elif table.text is not None:
        dataset = TextDataset(
            table.text,
            tokenizer,
            length=length,
            field=table.field,
            packing=table.packing,
            end_of_text=table.end_of_text,
            cache_directory=table.cache,
        )
    elif table.instructions is not None:
        dataset = InstructionDataset(
            table.instructions, tokenizer, length=length, cache_directory=table.cache
        )
    elif table.megatron is not None:
        dataset = MegatronDataset(table.megatron, length=length)
    elif table.images is not None:
        dataset = ImageArrays(table.images)
    else:
        dataset = SavedDataset(str(table.huggingface), model)
    return _checked(dataset, model)


def _checked(dataset: Any, model: HuggingFaceModel) -> Any:
    """Return the data set with a check that rejects classes unknown to the model.

    The engine checks the token ids of every batch; those of a small data set are also checked before
    training.

    :raises DataError: a token id is outside the model's vocabulary.
    """
    if model.classes is not None:
        return CheckedClasses(dataset, model.classes)
    searched = hasattr(dataset, "check_vocabulary") and len(dataset) <= _SCANNED_SAMPLES
    if searched and model.vocabulary is not None:
        dataset.check_vocabulary(model.vocabulary)
    return dataset


def _is_unequal(table: DataTable) -> bool:
    """Return whether the samples of a table may have unequal lengths."""
    return table.huggingface is not None or table.instructions is not None or not table.packing


def _collate(
    table: DataTable,
    evaluation: EvaluationTable,
    model: HuggingFaceModel,
    tokenizer: LoadedTokenizer | None,
    sample: Any,
) -> Collate | None:
    """Return the collator that the data and the task need; None to stack samples.

    :raises DataError: there is no token for padding or masks.
    """
    if "input_ids" not in sample:
        return None
    masked = model.task == "masked-lm" and table.collate != "pad"
    if masked and not (table.huggingface is not None and "labels" in sample):
        if tokenizer is None:
            raise DataError("masking needs a tokenizer: write data.tokenizer")
        return MaskedLanguageModelCollate(str(tokenizer.path), probability=table.mask_probability)
    # The same function makes the batches of the held-out data.
    tables = [table] if evaluation.data is None or not evaluation.every_steps else [table, evaluation.data]
    if table.collate != "pad" and not any(map(_is_unequal, tables)):
        return None
    pad = None if tokenizer is None else tokenizer.pad_token_id
    pad = getattr(model.config, "pad_token_id", None) if pad is None else pad
    if pad is None:
        raise DataError(
            "there is no token to pad with: write data.tokenizer, or pad_token_id in [model.overrides]"
        )
    return CausalCollate(pad) if model.task == "causal-lm" else PadCollate(pad)
