"""Tokenizers, read without transformers from the files that ``tokenizers`` and ``transformers`` save."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.sources.errors import DataError, expand_home, import_package

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Usual end-of-text tokens, for tokenizers whose configuration names none."""
PADDING_NAMES = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files next to tokenizer.json that name the special tokens; the first file takes precedence."""
MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer and the meaning of its special tokens."""

    tokenizer: Any
    """A ``tokenizers.Tokenizer`` that neither pads nor truncates."""
    path: Path
    """Path of its tokenizer.json."""
    digest: str
    """Checksum of all files that determine token ids."""
    vocabulary_size: int
    """Largest token id that it can make, plus 1."""
    end_of_text_id: int | None
    """End-of-text token; None if neither the configuration nor a usual name identifies it."""
    pad_token_id: int | None
    """Padding token, else the end-of-text token, else None."""
    mask_token_id: int | None
    special_token_ids: tuple[int, ...]

    @property
    def directory(self) -> Path:
        """Directory with all files of the tokenizer; the file itself if it has another name than
        tokenizer.json.
        """
        return self.path.parent if self.path.name == "tokenizer.json" else self.path

    def end_of_text(self, wanted: bool | str) -> int | None:
        """Return the id of the token that ends a document.

        :param wanted: False for none, True for the tokenizer's own, or the token itself.
        :raises DataError: the tokenizer has no such token.
        """
        if wanted is False:
            return None
        if wanted is True:
            if self.end_of_text_id is None:
                raise DataError(
                    f"the tokenizer {self.path} names no token for the end of a text; "
                    'set end_of_text to one of its tokens ("</s>"), or to false'
                )
            return self.end_of_text_id
        found: int | None = self.tokenizer.token_to_id(wanted)
        if found is None:
            raise DataError(f"end_of_text {wanted!r} is no token of the tokenizer {self.path}")
        return found


def load_tokenizer(where: str) -> LoadedTokenizer:
    """Read a tokenizer.

    :param where: a tokenizer.json, or a directory with one as ``save_pretrained`` writes it.
    :raises DataError: the tokenizer is missing or corrupt, or cannot be read.
    """
    try:
        return _load(where)
    except OSError as error:
        raise DataError(f"the tokenizer {where} cannot be read: {error}") from error


def _load(where: str) -> LoadedTokenizer:
    path = _find(where)
    package = import_package("tokenizers", "turning text into tokens")
    try:
        tokenizer = package.Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"the tokenizer {path} has an empty vocabulary")
    named = _named_tokens(path.parent)
    end = _token_id(vocabulary, (named.get("eos_token"), named.get("sep_token"), *END_OF_TEXT_NAMES))
    pad = _token_id(vocabulary, (named.get("pad_token"), *PADDING_NAMES))
    added = tokenizer.get_added_tokens_decoder()
    return LoadedTokenizer(
        tokenizer=tokenizer,
        path=path,
        digest=_digest(path),
        vocabulary_size=max(vocabulary.values()) + 1,
        end_of_text_id=end,
        pad_token_id=end if pad is None else pad,
        mask_token_id=_token_id(vocabulary, (named.get("mask_token"), *MASK_NAMES)),
        special_token_ids=tuple(sorted(number for number, token in added.items() if token.special)),
    )


def _find(where: str) -> Path:
    path = expand_home(where)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"tokenizer {path} does not exist (looked from {Path.cwd()})")
    if not (path / "tokenizer.json").is_file():
        names = sorted(entry.name for entry in path.iterdir())
        raise DataError(
            f"{path} has no tokenizer.json (it has {', '.join(names[:8]) or 'nothing'}); write one with "
            f'AutoTokenizer.from_pretrained("{path}").save_pretrained("{path}"), '
            "or make a tokenizer with: ftd data train-tokenizer"
        )
    return path / "tokenizer.json"


def _digest(path: Path) -> str:
    """Return the checksum of tokenizer.json and of the files next to it that affect the tokens."""
    digest = hashlib.sha256(path.read_bytes())
    for name in (*NAMING_FILES, "chat_template.jinja"):
        neighbour = path.parent / name
        digest.update(b"\0" + (neighbour.read_bytes() if neighbour.is_file() else b""))
    return digest.hexdigest()


def _named_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens that the files next to tokenizer.json name; the first file takes precedence."""
    named: dict[str, str] = {}
    for name in NAMING_FILES:
        try:
            content = json.loads((directory / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise DataError(f"{directory / name} is corrupt: {error}") from error
        for key, token in content.items() if isinstance(content, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str):
                named.setdefault(key, text)
    return named


def _token_id(vocabulary: dict[str, int], names: tuple[str | None, ...]) -> int | None:
    return next((vocabulary[name] for name in names if name is not None and name in vocabulary), None)
