"""The common base of data sets whose files each node tokenises."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.sources.cache import cached_directory, file_signature, fingerprint
from runtime.sources.collators import IGNORED_LABEL, PadCollate
from runtime.sources.documents import Document
from runtime.sources.errors import DataError
from runtime.sources.packed import ArrayStream, check_index
from runtime.sources.token_file import open_tokens
from runtime.sources.tokenizer import LoadedTokenizer
from runtime.sources.tokenizing import Encoder, required_info, write_tokens

CACHE_VERSION = 1
"""Part of every fingerprint; increase it if the same input makes other tokens."""


class TokenisedDataset:
    """A data set of samples ``{"input_ids", "labels"}`` from files that the node tokenises once and caches."""

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        files: Sequence[Path],
        *,
        facts: Mapping[str, Any],
        documents: Callable[[], Iterable[Document]],
        encode: Encoder,
        with_learned: bool = False,
        cache_directory: str | None,
    ) -> None:
        """Find the tokens in the cache, or make them.

        :param facts: everything that determines the tokens besides the files and the tokenizer.
        :param with_learned: whether to store which tokens are learned.
        """
        self._tokenizer = tokenizer
        key = fingerprint(
            {
                "version": CACHE_VERSION,
                "files": [file_signature(path) for path in files],
                "tokenizer": tokenizer.digest,
                **facts,
            }
        )

        def make(directory: Path) -> None:
            _log(f"making tokens of {len(files)} files with {tokenizer.path}")
            learned = directory / "learned.bin" if with_learned else None
            ends = write_tokens(directory / "tokens.bin", documents(), tokenizer, encode, _log, learned)
            np.save(directory / "ends.npy", ends)

        directory = cached_directory(cache_directory, key, make, _log)
        self._info = required_info(directory / "tokens.bin")
        self._stream: ArrayStream = open_tokens(directory / "tokens.bin")
        self._ends: npt.NDArray[np.int64] = np.load(directory / "ends.npy", mmap_mode="r")
        self._learned: npt.NDArray[np.bool_] | None = (
            np.memmap(directory / "learned.bin", dtype=np.bool_, mode="r") if with_learned else None
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = check_index(index, len(self._ends))
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        input_ids = torch.from_numpy(self._stream.read(start, end).astype(np.int64))
        labels = input_ids.clone()
        if self._learned is not None:
            labels[torch.from_numpy(~self._learned[start:end])] = IGNORED_LABEL
        return {"input_ids": input_ids, "labels": labels}

    @property
    def vocabulary_size(self) -> int:
        """The tokenizer's largest possible token id plus 1, which is the least that a model for it needs."""
        return self._tokenizer.vocabulary_size

    def pad_collate(self, multiple_of: int | None = 8) -> PadCollate:
        """Return a collator that pads with the tokenizer's padding token.

        :raises DataError: the tokenizer has none.
        """
        if self._tokenizer.pad_token_id is None:
            raise DataError(
                f"the tokenizer {self._tokenizer.path} has neither a padding token nor one for the end of a "
                "text; make a PadCollate with the token id to pad with"
            )
        return PadCollate(self._tokenizer.pad_token_id, multiple_of=multiple_of)

    def max_token_id(self) -> int:
        """Return the largest token id of the documents."""
        return self._info.max_token_id

    def check_vocabulary(self, size: int) -> None:
        """Check that a model with ``size`` token ids can read every token.

        :raises DataError: a token id is outside the vocabulary; the message gives it and a document with
            it.
        """
        if self._info.max_token_id >= size:
            raise DataError(
                f"{self._info.max_token_location}: the tokenizer {self._tokenizer.path} makes the token id "
                f"{self._info.max_token_id}, but the model's vocabulary has {size} entries; use the model's "
                f"own tokenizer, or a vocabulary of at least {self._tokenizer.vocabulary_size}"
            )


def _log(line: str) -> None:
    """Write a line about the progress to the trainer's log."""
    print(f"data: {line}", file=sys.stderr, flush=True)
