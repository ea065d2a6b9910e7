"""Training of a byte-level BPE tokenizer on a corpus, saved in the format of transformers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.sources.documents import Document, read_texts
from runtime.sources.errors import DataError, import_package
from storage.atomic import atomic_file

END_OF_TEXT, PADDING, MASK = "<|endoftext|>", "<|padding|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, PADDING, MASK)
"""Special tokens; their ids are their positions in this tuple."""
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(files: Sequence[Path], *, field: str, vocabulary: int, out: Path) -> int:
    """Train a tokenizer on the texts of files, and save it in the directory ``out``.

    It is a BPE (Sennrich et al. 2016) on bytes, so that every text can be tokenised, with one token each
    for the end of a text, for padding and for masks.

    :param vocabulary: maximum number of tokens.
    :returns: the number of tokens.
    :raises DataError: a file cannot be used, or there is no text.
    """
    tokenizers = import_package("tokenizers", "training a tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (_checked(document) for document in read_texts(files, field))
    first = next(texts, None)
    if first is None:
        raise DataError("the files have no text, so there is nothing to train a tokenizer on")

    def corpus() -> Iterator[str]:
        yield first
        yield from texts

    tokenizer.train_from_iterator(corpus(), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "pad_token": PADDING,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    out.mkdir(parents=True, exist_ok=True)
    with atomic_file(out / "tokenizer_config.json") as draft:
        draft.write_text(json.dumps(config, indent=2), encoding="utf-8")
    with atomic_file(out / "tokenizer.json") as draft:
        draft.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    size: int = tokenizer.get_vocab_size()
    return size


def _checked(document: Document) -> str:
    """Return the text.

    :raises DataError: it has no bytes in UTF-8, since JSON may write half of a character.
    """
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{document.location}: this text is not valid Unicode: {error}") from error
    return document.text
