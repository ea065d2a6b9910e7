"""Token files of Megatron-LM: ``prefix.bin`` contains the tokens, and ``prefix.idx`` the position of each
sequence.

An index of version 1 consists of the following, without gaps and in little-endian order: the nine bytes
``MMIDIDX``, 0, 0; the version (8 bytes); a code for the type of the tokens (1 byte); the number of
sequences and that of document boundaries (8 bytes each); then for each sequence its number of tokens (4
bytes), for each its first byte in the ``.bin`` (8 bytes), and the document boundaries, counted in sequences
from 0 to the number of sequences (8 bytes each). Files with several kinds of data have one more byte for
each sequence.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.sources.errors import DataError, expand_home
from runtime.sources.packed import PackedTokens, Tokens

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronDataset(PackedTokens):
    """Megatron's indexed data sets, with all documents joined and cut into samples of ``length`` tokens.

    The documents have the order of the index, with the tokens that ``--append-eod`` put between them. The
    remainder at the end is not used. The job draws the samples of each step at random, so the documents
    need not be shuffled.
    """

    def __init__(self, prefix: str | Sequence[str], *, length: int) -> None:
        """Read the index and map the tokens into memory.

        :param prefix: the files' path without ``.bin`` and ``.idx``, or a list of them.
        :raises DataError: a file is missing or corrupt, or is shorter than a sample.
        """
        prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
        if not prefixes:
            raise DataError("no Megatron data is named; give the path of its files without .bin and .idx")
        super().__init__([_IndexedStream(name) for name in prefixes], length=length)


class _IndexedStream:
    """The sequences of one index as one stream of tokens."""

    largest: int | None = None

    def __init__(self, prefix: str) -> None:
        base = expand_home(prefix.removesuffix(".bin").removesuffix(".idx"))
        self._index, self._tokens = base.with_name(f"{base.name}.idx"), base.with_name(f"{base.name}.bin")
        for path in (self._index, self._tokens):
            if not path.is_file():
                raise DataError(
                    f"{path} does not exist (looked from {Path.cwd()}); a Megatron prefix names "
                    f"{self._tokens.name} and {self._index.name}"
                )
        self.name = str(self._tokens)
        try:
            if not self._index.stat().st_size:
                raise self._corrupt("it is empty")
            content = np.memmap(self._index, dtype=np.uint8, mode="r")
            size = self._tokens.stat().st_size
            dtype, lengths, self._starts = self._parse(content, size)
            self._bytes = np.memmap(self._tokens, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
        except OSError as error:
            raise DataError(f"{base} cannot be read: {error}") from error
        self._dtype = dtype
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def read(self, start: int, end: int) -> Tokens:
        """Return the tokens at ``[start, end)`` of the concatenated sequences."""
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            first = int(self._ends[number - 1]) if number else 0
            stop = min(end, int(self._ends[number]))
            if stop > start:
                offset = int(self._starts[number]) + (start - first) * self._dtype.itemsize
                part = self._bytes[offset : offset + (stop - start) * self._dtype.itemsize]
                parts.append(part.view(self._dtype))
            start = max(start, stop)
            number += 1
        return np.concatenate(parts)

    def _parse(
        self, content: npt.NDArray[np.uint8], size: int
    ) -> tuple[np.dtype[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the tokens' type, and each sequence's number of tokens and first byte."""
        if len(content) < HEADER.size or bytes(content[: len(MAGIC)]) != MAGIC:
            raise self._corrupt("it does not begin as a Megatron index does")
        _, version, code, sequences, boundaries = HEADER.unpack(content[: HEADER.size].tobytes())
        if version != 1:
            raise self._corrupt(f"it has version {version}, and only version 1 is known")
        if code not in DTYPES:
            raise self._corrupt(f"the type {code} of its tokens is none of whole numbers")
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        wanted = HEADER.size + 12 * sequences + 8 * boundaries
        if len(content) not in (wanted, wanted + sequences):
            raise self._corrupt(
                f"it has {len(content)} bytes, but {sequences} sequences with {boundaries} boundaries of "
                f"documents need {wanted}"
            )
        lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
        starts = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
        documents = np.frombuffer(content, "<i8", boundaries, HEADER.size + 12 * sequences)
        if (lengths < 0).any() or (starts < 0).any():
            raise self._corrupt("a sequence has a negative length or position")
        outside = starts + lengths.astype(np.int64) * dtype.itemsize > size
        if outside.any():
            raise self._corrupt(
                f"sequence {int(outside.argmax())} ends after the {size} bytes of {self._tokens.name}; "
                "the two files do not belong together, or one was cut off"
            )
        if (
            not documents.size
            or documents[0] != 0
            or documents[-1] != sequences
            or (np.diff(documents) < 0).any()
        ):
            raise self._corrupt("its documents do not cover its sequences in order")
        return dtype, lengths, starts

    def _corrupt(self, problem: str) -> DataError:
        return DataError(
            f"{self._index} is not a valid index: {problem}. Make it again with Megatron's preprocessing"
        )
