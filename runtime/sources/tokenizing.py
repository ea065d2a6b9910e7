"""Texts made into a flat file of tokens, in one pass over corpora of any size."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.sources.cache import Report
from runtime.sources.documents import Document
from runtime.sources.errors import DataError
from runtime.sources.tokenizer import LoadedTokenizer

Tokens = npt.NDArray[np.integer[Any]]

Encoder = Callable[[list[Document]], list[Tokens]]
"""Makes the tokens of each document."""

DOCUMENTS_AT_ONCE = 1024
CHARACTERS_AT_ONCE = 4_000_000
REPORT_EVERY_S = 10.0


class TokenFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a token file, in a JSON file of the same name with ``.json`` after it."""

    dtype: str
    """numpy's name of a token's type: "uint16"."""
    tokens: int
    documents: int
    max_token_id: int
    max_token_place: str
    """A document with that token: "corpus.jsonl, line 7"."""
    vocabulary_size: int
    """The tokenizer's largest possible token id, plus 1."""
    tokenizer_digest: str


def info_path(tokens: Path) -> Path:
    """Return where the facts about a token file are."""
    return tokens.with_name(f"{tokens.name}.json")


def read_info(tokens: Path) -> TokenFileInfo | None:
    """Return the facts about a token file, or None where nobody wrote them.

    :raises DataError: they are damaged, or are not those of this file.
    """
    path = info_path(tokens)
    try:
        info = msgspec.json.decode(path.read_bytes(), type=TokenFileInfo)
        wanted = info.tokens * np.dtype(info.dtype).itemsize
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise DataError(
            f"{path} is damaged: {error}; make the token file again, or remove {path.name}"
        ) from error
    size = tokens.stat().st_size
    if size != wanted:
        raise DataError(
            f"{tokens} has {size} bytes, but {path.name} says {wanted}; make the token file again, "
            f"or remove {path.name} if it belongs to another file"
        )
    return info


def required_info(tokens: Path) -> TokenFileInfo:
    """Return the facts about a token file.

    :raises DataError: they are missing or damaged.
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

    def encode(documents: list[Document]) -> list[Tokens]:
        texts = [document.text for document in documents]
        encodings = tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids + ending, dtype=np.int64) for encoding in encodings]

    return encode


def separate_documents(tokenizer: LoadedTokenizer, end_of_text: int | None, length: int) -> Encoder:
    """Return an encoder with the tokenizer's special tokens, and at most ``length`` tokens a document.

    A document that had to be cut does not get ``end_of_text``, nor does one that ends with it already.
    """

    def encode(documents: list[Document]) -> list[Tokens]:
        texts = [document.text for document in documents]
        tokenizer.tokenizer.enable_truncation(length)
        encodings = tokenizer.tokenizer.encode_batch_fast(texts)
        tokenizer.tokenizer.no_truncation()
        return [np.array(_ended(encoding), dtype=np.int64) for encoding in encodings]

    def _ended(encoding: Any) -> list[int]:
        ids: list[int] = encoding.ids
        ended = end_of_text is None or len(ids) >= length or ids[-1:] == [end_of_text]
        return ids if ended or end_of_text is None else [*ids, end_of_text]

    return encode


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
    out: Path, documents: Iterable[Document], tokenizer: LoadedTokenizer, encode: Encoder, report: Report
) -> npt.NDArray[np.int64]:
    """Write the tokens of all documents one after the other, and the facts about them, and return their ends.

    :return: for each document the number of tokens in the file up to its end.
    :raises DataError: there is no text, or the tokenizer fails on one.
    """
    dtype = token_dtype(tokenizer.vocabulary_size)
    progress = _Progress(report)
    lengths: list[npt.NDArray[np.int64]] = []
    largest, largest_place = -1, ""
    with out.open("wb") as stream:
        for batch in _batches(documents):
            arrays = _encode(batch, tokenizer, encode)
            tokens = np.concatenate(arrays)
            sizes = np.array([array.size for array in arrays], dtype=np.int64)
            if tokens.size and int(tokens.max()) > largest:
                position = int(tokens.argmax())
                largest = int(tokens[position])
                largest_place = batch[int(np.searchsorted(np.cumsum(sizes), position, side="right"))].place
            stream.write(tokens.astype(dtype).tobytes())
            lengths.append(sizes)
            progress.count(len(batch), tokens.size)
    if not progress.tokens:
        raise DataError("the files have no text, so there are no tokens")
    progress.finish()
    info = TokenFileInfo(
        dtype=dtype,
        tokens=progress.tokens,
        documents=progress.documents,
        max_token_id=largest,
        max_token_place=largest_place,
        vocabulary_size=tokenizer.vocabulary_size,
        tokenizer_digest=tokenizer.digest,
    )
    info_path(out).write_bytes(msgspec.json.format(msgspec.json.encode(info)))
    return np.cumsum(np.concatenate(lengths), dtype=np.int64)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= DOCUMENTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: list[Document], tokenizer: LoadedTokenizer, encode: Encoder) -> list[Tokens]:
    try:
        return encode(batch)
    except Exception as error:
        for document in batch:
            try:
                encode([document])
            except Exception as cause:
                raise DataError(
                    f"{document.place}: the tokenizer {tokenizer.path} fails on this text: {cause}"
                ) from cause
        raise DataError(f"the tokenizer {tokenizer.path} fails after {batch[0].place}: {error}") from error
