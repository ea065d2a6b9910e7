"""Text for language models: made into tokens once on each node, and kept."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.sources.cache import cached_directory, file_facts, fingerprint
from runtime.sources.collators import PadCollate
from runtime.sources.documents import read_texts
from runtime.sources.errors import DataError, check_length, find_files
from runtime.sources.packed import ArrayStream, PackedTokens, check_index
from runtime.sources.token_file import open_tokens
from runtime.sources.tokenizer import load_tokenizer
from runtime.sources.tokenizing import join_documents, required_info, separate_documents, write_tokens

CACHE_VERSION = 1
"""Part of every fingerprint; raise it when the same input makes other tokens."""


class TextDataset:
    """Documents of JSON lines, Parquet, Arrow or plain text files as samples ``{"input_ids", "labels"}``.

    With packing the documents are joined, each with the token for the end of a text after it, and cut into
    samples of exactly ``length`` tokens; what is left at the end is not used. Without packing each document
    is a sample of its own with the tokenizer's special tokens, of at most ``length`` tokens; form batches of
    them with ``pad_collate``.

    The first trainer on a node turns all text into tokens and keeps them; the others, and later jobs with the
    same files and tokenizer, map them into memory. To prepare a large corpus before a job use
    ``ftd data tokenize`` and ``TokenFile``.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: str,
        *,
        length: int,
        field: str = "text",
        packing: bool = True,
        end_of_text: bool | str = True,
        cache_directory: str | None = None,
    ) -> None:
        """Tokenise the files, or find their tokens.

        :param files: a path, a pattern or a list of them; a pattern's files are taken in the order of names.
        :param tokenizer: a tokenizer.json, or a directory with one as ``save_pretrained`` writes it.
        :param length: tokens of a sample: exactly with packing, at most without.
        :param field: the field with the text, in files with records.
        :param end_of_text: whether a token ends each document; or that token, if the tokenizer names another.
        :param cache_directory: where tokens are kept; None is ``$XDG_CACHE_HOME/ftd`` or ``~/.cache/ftd``.
        :raises DataError: a file, a record or the tokenizer cannot be used.
        """
        check_length(length)
        paths = find_files(files, "text file")
        loaded = load_tokenizer(tokenizer)
        ending = loaded.end_of_text(end_of_text)
        key = fingerprint(
            {
                "version": CACHE_VERSION,
                "files": [file_facts(path) for path in paths],
                "tokenizer": loaded.digest,
                "field": field,
                "end_of_text": ending,
                "length": None if packing else length,
            }
        )

        def tokenise(directory: Path) -> None:
            log(f"making tokens of {len(paths)} files with {loaded.path}")
            encode = join_documents(loaded, ending) if packing else separate_documents(loaded, ending, length)
            ends = write_tokens(directory / "tokens.bin", read_texts(paths, field), loaded, encode, log)
            np.save(directory / "ends.npy", np.unique(ends[ends > 0]))

        directory = cached_directory(cache_directory, key, tokenise, log)
        self._tokenizer = loaded
        self._info = required_info(directory / "tokens.bin")
        stream = open_tokens(directory / "tokens.bin")
        self._samples: PackedTokens | DocumentTokens
        if packing:
            self._samples = PackedTokens([stream], length=length)
        else:
            self._samples = DocumentTokens(stream, np.load(directory / "ends.npy", mmap_mode="r"))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]

    @property
    def vocabulary_size(self) -> int:
        """The tokenizer's largest possible token id, plus 1: what a model for it needs at least."""
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

        :raises DataError: a token id lies outside; the message names it and a document with it.
        """
        if self._info.max_token_id >= size:
            raise DataError(
                f"{self._info.max_token_place}: the tokenizer {self._tokenizer.path} makes the token id "
                f"{self._info.max_token_id}, but the model's vocabulary has {size} entries; use the model's "
                f"own tokenizer, or a vocabulary of at least {self.vocabulary_size}"
            )


class DocumentTokens:
    """Documents of unequal lengths in one row of tokens, a sample each."""

    def __init__(self, stream: ArrayStream, ends: npt.NDArray[np.int64]) -> None:
        self._stream = stream
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = check_index(index, len(self))
        start = int(self._ends[index - 1]) if index else 0
        input_ids = torch.from_numpy(self._stream.read(start, int(self._ends[index])).astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}


def log(line: str) -> None:
    """Write a line about the progress to the trainer's log."""
    print(f"data: {line}", file=sys.stderr, flush=True)
