"""Samples of equal length, cut from long streams of tokens at positions that are known beforehand."""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.sources.errors import DataError, check_length, check_number

Tokens = npt.NDArray[np.integer[Any]]
SCAN_TOKENS = 1 << 24


class TokenStream(Protocol):
    """A long sequence of tokens that is read in parts."""

    @property
    def name(self) -> str:
        """Name of the file, for messages."""

    @property
    def largest(self) -> int | None:
        """Largest token id if it is known without reading; then no token id is negative."""

    def __len__(self) -> int: ...

    def read(self, start: int, end: int) -> Tokens:
        """Return the tokens at ``[start, end)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayStream:
    """A sequence of tokens in an array, which may be a file mapped into memory."""

    name: str
    tokens: Tokens
    largest: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, end: int) -> Tokens:
        """Return the tokens at ``[start, end)``."""
        return self.tokens[start:end]


class PackedTokens:
    """Samples ``{"input_ids", "labels"}`` of ``length`` tokens each (int64), both with the same values.

    Models of Hugging Face's transformers compare position i with label i + 1, so the labels are not
    shifted. Samples begin every ``stride`` tokens, and none crosses from one stream into the next: tokens
    at the end of a stream that do not fill a sample are not used.
    """

    def __init__(self, streams: Sequence[TokenStream], *, length: int, stride: int | None = None) -> None:
        """Cut the streams.

        :param stride: tokens from the beginning of a sample to that of the next; None is ``length``.
        :raises DataError: no stream is as long as a sample, or a number is out of range.
        """
        self._streams = tuple(streams)
        check_length(length)
        if stride is not None:
            check_number("stride, the tokens between samples,", stride)
        self._length = length
        self._stride = length if stride is None else stride
        counts = [max(0, (len(stream) - length) // self._stride + 1) for stream in self._streams]
        self._ends = list(accumulate(counts))
        if not self._ends or not self._ends[-1]:
            longest = max(self._streams, key=len, default=None)
            found = "nothing" if longest is None else f"{len(longest)} tokens in {longest.name}"
            raise DataError(
                f"there is no sample of {length} tokens: the longest source has {found}; "
                "take a smaller length or more text"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = check_index(index, len(self))
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        start = (index - first) * self._stride
        tokens = self._streams[number].read(start, start + self._length)
        input_ids = torch.from_numpy(tokens.astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def max_token_id(self) -> int:
        """Return the largest token id. This reads all tokens once, unless the file's description has it."""
        return max(_largest(stream) for stream in self._streams if len(stream))

    def check_vocabulary(self, size: int) -> None:
        """Check that a model with ``size`` token ids can read every token.

        This reads all tokens once, unless the file's description has the largest id.

        :raises DataError: a token id is outside the vocabulary; the message gives the first and its
            position.
        """
        for stream in self._streams:
            if stream.largest is not None and stream.largest < size:
                continue
            for start, part in _parts(stream):
                outside = (part < 0) | (part >= size)
                if outside.any():
                    position = int(outside.argmax())
                    raise DataError(
                        f"{stream.name}, token {start + position}: the token id {int(part[position])} is "
                        f"outside the model's vocabulary of {size} entries; use the tokenizer and the token "
                        "type that the data was made with, or a larger vocabulary"
                    )


def _parts(stream: TokenStream) -> Iterator[tuple[int, Tokens]]:
    return (
        (start, stream.read(start, min(start + SCAN_TOKENS, len(stream))))
        for start in range(0, len(stream), SCAN_TOKENS)
    )


def _largest(stream: TokenStream) -> int:
    if stream.largest is not None:
        return stream.largest
    return max(int(part.max()) for _, part in _parts(stream))


def check_index(index: int, length: int) -> int:
    """Return the index of a sample, in which negative numbers count from the end, as in a list."""
    index = operator.index(index)
    if not -length <= index < length:
        raise IndexError(f"sample {index} of a data set with {length} samples")
    return index % length
