"""Collators: functions that make a batch from samples of unequal lengths.

Random ones draw from torch's default generator. The loader seeds it by (seed, step, microbatch), so that
every stage and every device of a pipeline gets the same batch.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from runtime.sources.errors import DataError, check_number
from runtime.sources.tokenizer import load_tokenizer

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss, as in ``torch.nn.functional.cross_entropy``."""


class PadCollate:
    """A collator of dict samples, which pads them at the end to the longest sample of the batch.

    ``input_ids`` get the padding token, ``labels`` -100 and every other value with one dimension 0. If the
    samples have no ``attention_mask``, one is added: 1 for the tokens of a sample, 0 for padding. Values
    without a dimension, such as a class, and those with several dimensions are stacked.
    """

    def __init__(self, pad_token_id: int, *, multiple_of: int | None = 8, length: int | None = None) -> None:
        """Set the rules of padding.

        :param multiple_of: rounds padded lengths up, which suits tensor cores and makes fewer shapes.
        :param length: length to which all batches are padded; None for the longest sample of each batch.
        :raises DataError: a number is out of range.
        """
        check_number("pad_token_id", pad_token_id, 0)
        for name, number in (("multiple_of", multiple_of), ("length", length)):
            if number is not None:
                check_number(name, number)
        self._pad_token_id = pad_token_id
        self._multiple_of = multiple_of or 1
        self._length = length

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the batch: each value of the samples, with the samples in dim 0.

        :raises DataError: the samples do not fit together; the message names the value.
        """
        columns = _columns(samples)
        if "attention_mask" not in columns:
            columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
        return {name: self._batched(name, column) for name, column in columns.items()}

    def _batched(self, name: str, column: list[Tensor]) -> Tensor:
        if len({value.dim() for value in column}) == 1 and column[0].dim() == 1:
            return self._padded(name, column)
        if len({value.shape for value in column}) > 1:
            shapes = sorted({str(tuple(value.shape)) for value in column})
            raise DataError(
                f'the samples\' "{name}" have unequal shapes {", ".join(shapes)}; only values with '
                "one dimension are padded"
            )
        return torch.stack(column)

    def _padded(self, name: str, column: list[Tensor]) -> Tensor:
        longest = max(len(value) for value in column)
        if self._length is not None and longest > self._length:
            raise DataError(
                f'a sample\'s "{name}" has {longest} values, more than the length {self._length} that '
                "batches are padded to; cut the samples or take a larger length"
            )
        length = self._length or -(-longest // self._multiple_of) * self._multiple_of
        fill = {"input_ids": self._pad_token_id, "labels": IGNORED_LABEL}.get(name, 0)
        # An empty list has no type of its own: torch takes it for floating-point numbers.
        dtypes = [value.dtype for value in column if len(value)] or [column[0].dtype]
        batch = column[0].new_full((len(column), length), fill, dtype=reduce(torch.promote_types, dtypes))
        for row, value in zip(batch, column, strict=True):
            row[: len(value)] = value
        return batch


class CausalCollate(PadCollate):
    """A ``PadCollate`` that adds ``labels`` if samples have none: the tokens, and -100 for padding.

    It is for samples of a language model that only have ``input_ids``, such as those of a tokenised data
    set of the package ``datasets``.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the batch, with the samples in dim 0."""
        batch = super().__call__(samples)
        if "labels" not in batch:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
        return batch


class MaskedLanguageModelCollate:
    """A collator for masked language models, after Devlin et al., "BERT", 2019, section 3.1.

    Each token that is neither special nor padding is chosen with a given probability. Of the chosen tokens
    80% become the mask token, 10% a random token, and 10% stay. ``labels`` are the original tokens where
    chosen, and -100 elsewhere. A batch without a chosen token has no loss.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        *,
        probability: float = 0.15,
        mask_token_id: int | None = None,
        vocabulary_size: int | None = None,
        pad_token_id: int | None = None,
        special_token_ids: Sequence[int] | None = None,
        multiple_of: int | None = 8,
        length: int | None = None,
    ) -> None:
        """Take the token ids from a tokenizer, or as arguments.

        :param tokenizer: a tokenizer.json, or a directory with one. Ids that are given take precedence.
        :param probability: fraction of the tokens that are chosen.
        :param multiple_of: same as for ``PadCollate``, which pads the samples first.
        :param length: same as for ``PadCollate``.
        :raises DataError: there is no mask token, or a number is out of range.
        """
        if isinstance(probability, bool) or not 0 < probability <= 1:
            raise DataError(f"probability must lie between 0 and 1, not {probability!r}")
        if tokenizer is not None:
            loaded = load_tokenizer(tokenizer)
            mask_token_id = loaded.mask_token_id if mask_token_id is None else mask_token_id
            vocabulary_size = loaded.vocabulary_size if vocabulary_size is None else vocabulary_size
            pad_token_id = loaded.pad_token_id if pad_token_id is None else pad_token_id
            special_token_ids = loaded.special_token_ids if special_token_ids is None else special_token_ids
        if mask_token_id is None or vocabulary_size is None or pad_token_id is None:
            raise DataError(
                "masking needs mask_token_id, vocabulary_size and pad_token_id"
                + (
                    f", and the tokenizer {tokenizer} does not name them all"
                    if tokenizer
                    else " or a tokenizer"
                )
                + "; a tokenizer with a mask token is made by: ftd data train-tokenizer"
            )
        if not 0 <= mask_token_id < vocabulary_size:
            raise DataError(
                f"mask_token_id {mask_token_id} is outside the vocabulary of {vocabulary_size} entries"
            )
        self._pad = PadCollate(pad_token_id, multiple_of=multiple_of, length=length)
        self._probability = float(probability)
        self._mask_token_id = mask_token_id
        self._vocabulary_size = vocabulary_size
        self._special_token_ids = torch.tensor(
            sorted({*(special_token_ids or ()), mask_token_id, pad_token_id})
        )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the batch, with the samples in dim 0; draws from torch's default generator."""
        batch = self._pad(samples)
        input_ids = batch["input_ids"]
        special = torch.isin(input_ids, self._special_token_ids) | (batch["attention_mask"] == 0)
        if "special_tokens_mask" in batch:
            special |= batch.pop("special_tokens_mask") != 0
        chosen = (torch.rand(input_ids.shape) < self._probability) & ~special
        fate = torch.rand(input_ids.shape)
        random_ids = torch.randint(self._vocabulary_size, input_ids.shape, dtype=input_ids.dtype)
        masked = input_ids.masked_fill(chosen & (fate < 0.8), self._mask_token_id)
        batch["labels"] = input_ids.masked_fill(~chosen, IGNORED_LABEL)
        batch["input_ids"] = torch.where(chosen & (fate >= 0.9), random_ids, masked)
        return batch


def _columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    first = samples[0]
    if not isinstance(first, Mapping) or "input_ids" not in first:
        found = (
            f"has {sorted(map(str, first))}" if isinstance(first, Mapping) else f"is a {type(first).__name__}"
        )
        raise DataError(f'samples must be dicts with "input_ids" to be padded; this one {found}')
    for sample in samples:
        if not isinstance(sample, Mapping) or sample.keys() != first.keys():
            raise DataError(
                f"samples of one batch must have the same names, not {sorted(map(str, first))} and "
                f"{sorted(map(str, sample))}"
            )
    return {name: [_tensor(name, sample[name]) for sample in samples] for name in first}


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f'the samples\' "{name}" must be numbers, not {type(value).__name__} ({error})'
        ) from error
