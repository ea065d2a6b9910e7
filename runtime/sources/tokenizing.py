"""Tokenisation of texts into a flat file, in one pass over corpora of any size."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.grouping import grouped
from runtime.sources.cache import Report
from runtime.sources.documents import Document, read_texts
from runtime.sources.errors import DataError
from runtime.sources.tokenizer import LoadedTokenizer


class Encoded(NamedTuple):
    """The tokens of one document; none if it must be left out."""

    ids: list[int]
    learned: npt.NDArray[np.bool_] | None = None
    """The tokens that a model learns; ``None``: all."""


Encoder = Callable[[list[Document]], list[Encoded]]

DOCUMENTS_AT_ONCE = 1024
CHARACTERS_AT_ONCE = 4_000_000
REPORT_EVERY_S = 10.0


class TokenFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a token file, stored in a JSON file of the same name with ``.json`` after it."""

    dtype: str
    """numpy's name of a token's type: "uint16"."""
    tokens: int
    documents: int
    max_token_id: int
    max_token_location: str
    """Location of a document with that token: "corpus.jsonl, line 7"."""
    vocabulary_size: int
    """The tokenizer's largest possible token id plus 1."""


def info_path(tokens: Path) -> Path:
    """Return the path of a token file's description."""
    return tokens.with_name(f"{tokens.name}.json")


def read_info(tokens: Path) -> TokenFileInfo | None:
    """Return the description of a token file; None if there is none.

    :raises DataError: it is corrupt, or describes another file.
    """
    path = info_path(tokens)
    try:
        info = msgspec.json.decode(path.read_bytes(), type=TokenFileInfo)
        wanted = info.tokens * np.dtype(info.dtype).itemsize
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise DataError(
            f"{path} is corrupt: {error}; make the token file again, or remove {path.name}"
        ) from error
    size = tokens.stat().st_size
    if size != wanted:
        raise DataError(
            f"{tokens} has {size} bytes, but {path.name} says {wanted}; make the token file again, "
            f"or remove {path.name} if it belongs to another file"
        )
    return info


def required_info(tokens: Path) -> TokenFileInfo:
    """Return the description of a token file.

    :raises DataError: it is missing or corrupt.
    """
    info = read_info(tokens)
    if info is None:
        raise DataError(f"{info_path(tokens)} is missing; remove {tokens.parent} so that it is made again")
    return info


def token_dtype(vocabulary_size: int) -> str:
    """Return the smallest type for tokens of a vocabulary."""
    return "uint16" if vocabulary_size <= 2**16 else "uint32"


def join_documents(tokenizer: LoadedTokenizer, end_of_text: int | None) -> Encoder:
    """Return an encoder without special tokens, but with ``end_of_text`` after each document."""
    ending = [] if end_of_text is None else [end_of_text]

    def encode(documents: list[Document]) -> list[Encoded]:
        texts = [document.text for document in documents]
        encodings = tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [Encoded(encoding.ids + ending) for encoding in encodings]

    return encode


def separate_documents(tokenizer: LoadedTokenizer, end_of_text: int | None, length: int) -> Encoder:
    """Return an encoder with the tokenizer's special tokens and at most ``length`` tokens per document.

    ``end_of_text`` is not added to a document that was cut, nor to one that already ends with it.
    """

    def encode(documents: list[Document]) -> list[Encoded]:
        texts = [document.text for document in documents]
        tokenizer.tokenizer.enable_truncation(length)
        encodings = tokenizer.tokenizer.encode_batch_fast(texts)
        tokenizer.tokenizer.no_truncation()
        return [Encoded(_ended(encoding.ids)) for encoding in encodings]

    def _ended(ids: list[int]) -> list[int]:
        if end_of_text is None or len(ids) >= length or ids[-1:] == [end_of_text]:
            return ids
        return [*ids, end_of_text]

    return encode


def make_token_file(
    out: Path,
    files: Sequence[Path],
    tokenizer: LoadedTokenizer,
    *,
    field: str,
    end_of_text: bool | str,
    report: Report,
) -> TokenFileInfo:
    """Write the texts of files as one token file, which gets its name when it is complete.

    :raises DataError: a file or the tokenizer cannot be used.
    """
    encode = join_documents(tokenizer, tokenizer.end_of_text(end_of_text))
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        write_tokens(unfinished, read_texts(files, field), tokenizer, encode, report)
        info = required_info(unfinished)
        info_path(out).unlink(missing_ok=True)
        unfinished.replace(out)
        info_path(unfinished).replace(info_path(out))
    finally:
        for path in (unfinished, info_path(unfinished)):
            path.unlink(missing_ok=True)
    return info


@dataclass(slots=True)
class _Progress:
    report: Report
    documents: int = 0
    tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)
    reported_s: float = field(default_factory=time.monotonic)

    def count(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        now_s = time.monotonic()
        if now_s - self.reported_s >= REPORT_EVERY_S:
            self.reported_s = now_s
            self.report(f"tokenising: {self._summary()}")

    def finish(self) -> None:
        self.report(f"tokenised {self._summary()} in {time.monotonic() - self.started_s:.1f} s")

    def _summary(self) -> str:
        return f"{self.documents} documents, {self.tokens} tokens"


def write_tokens(
    out: Path,
    documents: Iterable[Document],
    tokenizer: LoadedTokenizer,
    encode: Encoder,
    report: Report,
    learned: Path | None = None,
) -> npt.NDArray[np.int64]:
    """Write the tokens of all documents one after the other, and their description, and return their ends.

    :param learned: a file that gets a byte for each token: 1 if a model learns it.
    :returns: for each document that has tokens, the number of tokens in the file up to its end.
    :raises DataError: there is no text, or the tokenizer fails on one.
    """
    dtype = token_dtype(tokenizer.vocabulary_size)
    progress = _Progress(report)
    sizes: list[npt.NDArray[np.int64]] = []
    largest, largest_place = -1, ""
    with out.open("wb") as stream, (learned or Path(os.devnull)).open("wb") as learned_stream:
        for batch in grouped(
            documents, lambda document: len(document.text), CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE
        ):
            encoded = _encode(batch, tokenizer, encode)
            tokens = np.concatenate([np.array(document.ids, dtype=np.int64) for document in encoded])
            ends = np.cumsum([len(document.ids) for document in encoded])
            if tokens.size and int(tokens.max()) > largest:
                position = int(tokens.argmax())
                largest = int(tokens[position])
                largest_place = batch[int(np.searchsorted(ends, position, side="right"))].location
            stream.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            for document in encoded:
                mask = (
                    np.ones(len(document.ids), dtype=bool) if document.learned is None else document.learned
                )
                learned_stream.write(mask.tobytes())
            sizes.append(np.diff(ends, prepend=0))
            progress.count(len(batch), tokens.size)
    if not progress.documents:
        raise DataError("the files have no text, so there are no tokens")
    if not progress.tokens:
        raise DataError(
            f"none of the {progress.documents} documents has a token to learn from; take a larger length"
        )
    progress.finish()
    info = TokenFileInfo(
        dtype=dtype,
        tokens=progress.tokens,
        documents=progress.documents,
        max_token_id=largest,
        max_token_location=largest_place,
        vocabulary_size=tokenizer.vocabulary_size,
    )
    info_path(out).write_bytes(msgspec.json.format(msgspec.json.encode(info)))
    lengths = np.concatenate(sizes)
    return np.cumsum(lengths[lengths > 0], dtype=np.int64)


def _encode(batch: list[Document], tokenizer: LoadedTokenizer, encode: Encoder) -> list[Encoded]:
    try:
        return encode(batch)
    except Exception as error:
        for document in batch:
            try:
                encode([document])
            except Exception as cause:
                raise DataError(
                    f"{document.location}: the tokenizer {tokenizer.path} fails on this text: {cause}"
                ) from cause
        raise DataError(f"the tokenizer {tokenizer.path} fails after {batch[0].location}: {error}") from error
