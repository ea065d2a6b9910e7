"""Prompts with completions, and conversations, of which the model learns only the answers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.sources.documents import Document, read_records, text_field
from runtime.sources.errors import DataError, check_length, find_files, import_package
from runtime.sources.tokenised import TokenisedDataset
from runtime.sources.tokenizer import LoadedTokenizer, load_tokenizer
from runtime.sources.tokenizing import Encoded, Encoder


class InstructionDataset(TokenisedDataset):
    """Records of JSON lines, Parquet or Arrow files, each of which is a sample.

    A record has either a "prompt" and a "completion", which are concatenated and end with the end-of-text
    token, or "messages", a list of ``{"role", "content"}`` that the tokenizer's chat template renders.
    ``labels`` are -100 except for completions and for the answers of the role "assistant"; a token with
    characters of both a prompt and its completion counts as completion. A sample is cut after ``length``
    tokens; if all its labels are then -100, the record is not used. Tokens are cached like those of
    ``TextDataset``. Make batches with ``pad_collate``.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: str,
        *,
        length: int,
        cache_directory: str | None = None,
    ) -> None:
        """Tokenise the files, or find their tokens in the cache.

        :param files: a path, a pattern or a list of them; a pattern's files are taken in the order of
            names.
        :param tokenizer: a directory as ``save_pretrained`` writes it. Conversations need transformers.
        :param length: maximum number of tokens of a sample.
        :param cache_directory: directory of the cache; None is ``$XDG_CACHE_HOME/ftd`` or ``~/.cache/ftd``.
        :raises DataError: a file, a record or the tokenizer cannot be used.
        """
        check_length(length)
        paths = find_files(files, "file of instructions")
        loaded = load_tokenizer(tokenizer)
        super().__init__(
            loaded,
            paths,
            facts={"instructions": True, "length": length},
            documents=lambda: _documents(paths, loaded),
            encode=_encoder(loaded, length),
            with_learned=True,
            cache_directory=cache_directory,
        )


def _documents(paths: Iterable[Path], tokenizer: LoadedTokenizer) -> Iterator[Document]:
    template: _ChatTemplate | None = None
    for path in paths:
        for place, record in read_records(path):
            if record.get("messages") is not None:
                template = template or _ChatTemplate(tokenizer)
                yield template.render(place, record["messages"])
            elif "prompt" in record or "completion" in record:
                prompt = text_field(place, record, "prompt")
                completion = text_field(place, record, "completion")
                text = prompt + completion
                yield Document(place, text, learned=((len(prompt), len(text)),))
            else:
                names = ", ".join(f'"{name}"' for name in record)
                raise DataError(
                    f'{place}: an instruction has "prompt" and "completion", or "messages"; this one has '
                    f"{names or 'no fields'}"
                )


class _ChatTemplate:
    """The tokenizer's chat template, applied by transformers."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        transformers = import_package("transformers", "writing out conversations with a chat template")
        directory = tokenizer.path.parent
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"transformers cannot read the tokenizer in {directory}: {error}") from error
        self._directory = directory
        if not self._tokenizer.chat_template:
            raise DataError(
                f"the tokenizer in {directory} has no chat template for conversations; add "
                'chat_template.jinja, or give "prompt" and "completion"'
            )

    def render(self, place: str, messages: Any) -> Document:
        """Render a conversation. An answer extends from the end of its generation prompt to its own end."""
        _check_messages(place, messages)
        text = self._apply(place, messages, prompting=False)
        learned = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._apply(place, messages[:number], prompting=True)
                through = self._apply(place, messages[: number + 1], prompting=False)
                if not (text.startswith(through) and through.startswith(before)):
                    raise DataError(
                        f"{place}: the chat template in {self._directory} writes message {number + 1} in "
                        "another way when more messages follow, so that its tokens cannot be found; split "
                        'the conversation into several, or give "prompt" and "completion"'
                    )
                learned.append((len(before), len(through)))
        return Document(place, text, learned=tuple(learned), is_rendered=True)

    def _apply(self, place: str, messages: Any, *, prompting: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompting
            )
        except Exception as error:
            raise DataError(f"{place}: the chat template in {self._directory} fails: {error}") from error
        return text


def _check_messages(place: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{place}: "messages" must be a list with at least one message')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{place}: message {number} must be an object with "role" and "content", not '
                f"{json.dumps(message)[:80]}"
            )
    if messages[0]["role"] == "assistant":
        raise DataError(
            f"{place}: a conversation cannot begin with the role assistant; put a message of the user before it"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: no message has the role assistant, so there is nothing to learn")


def _encoder(loaded: LoadedTokenizer, length: int) -> Encoder:
    """Return an encoder that determines the learned tokens from the characters that they cover."""
    ending = loaded.end_of_text(True)

    def encode(documents: list[Document]) -> list[Encoded]:
        encoded: dict[int, Encoded] = {}
        for rendered in (False, True):
            numbers = [n for n, document in enumerate(documents) if document.is_rendered is rendered]
            encodings = loaded.tokenizer.encode_batch(
                [documents[n].text for n in numbers], add_special_tokens=not rendered
            )
            for n, encoding in zip(numbers, encodings, strict=True):
                encoded[n] = _cut(documents[n], encoding)
        return [encoded[n] for n in range(len(documents))]

    def _cut(document: Document, encoding: Any) -> Encoded:
        ids = list(encoding.ids)
        learned = _learned(encoding.offsets, document.learned)
        if not document.is_rendered:
            if ids[-1:] != [ending]:
                ids, learned = [*ids, ending], np.append(learned, True)
            learned[-1] = True
        ids, learned = ids[:length], learned[:length]
        return Encoded(ids, learned) if learned.any() else Encoded([], learned[:0])

    return encode


def _learned(offsets: Sequence[tuple[int, int]], parts: tuple[tuple[int, int], ...]) -> npt.NDArray[np.bool_]:
    """Return which tokens cover at least one character of the parts."""
    bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    learned = np.zeros(len(bounds), dtype=bool)
    for first, end in parts:
        learned |= (bounds[:, 1] > first) & (bounds[:, 0] < end) & (bounds[:, 1] > bounds[:, 0])
    return learned
