"""Collators: functions that make a batch of a list of samples of unequal lengths.

Random ones draw from torch's default generator. The loader seeds it by (seed, step, microbatch), so every
stage and every device of a pipeline gets the same batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.sources.errors import DataError

IGNORED_LABEL = -100
"""Label of a position without a loss, as ``torch.nn.functional.cross_entropy`` understands it."""


class PadCollate:
    """Batches of dict samples, padded at the end to the longest sample of the batch.

    ``input_ids`` get the padding token, ``labels`` -100 and every other value with one dimension 0. Where the
    samples have no ``attention_mask`` one is added: 1 for the tokens of a sample, 0 for padding. Values
    without a dimension, such as a class, and those with several are stacked.
    """

    def __init__(self, pad_token_id: int, *, multiple_of: int | None = 8, length: int | None = None) -> None:
        """Set the rules of padding.

        :param multiple_of: rounds padded lengths up, which suits tensor cores and makes fewer shapes.
        :param length: the length that all batches are padded to; None is that of a batch's longest sample.
        :raises DataError: a number makes no sense.
        """
        for name, number, least in (
            ("pad_token_id", pad_token_id, 0),
            ("multiple_of", multiple_of, 1),
            ("length", length, 1),
        ):
            missing = number is None and name != "pad_token_id"
            if not missing and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                raise DataError(f"{name} must be a whole number of at least {least}, not {number!r}")
        self._pad_token_id = pad_token_id
        self._multiple_of = multiple_of or 1
        self._length = length

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the batch: each value of the samples with the samples in dim 0.

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
        batch = column[0].new_full((len(column), length), fill)
        for row, value in zip(batch, column, strict=True):
            row[: len(value)] = value
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
