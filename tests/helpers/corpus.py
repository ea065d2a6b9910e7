"""A small tokenizer and small corpora for tests of data sources, made without any download."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"),
    *("while", "seven", "wizards", "box", "with", "five", "jugs"),
)
END_OF_TEXT = "<|endoftext|>"


def sentence(number: int, words: int = 8) -> str:
    """Return a text that is different for each number."""
    return (
        " ".join(WORDS[(number * 7 + i * i + number // 5) % len(WORDS)] for i in range(words)) + f" {number}"
    )


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def make_tokenizer(directory: Path, vocabulary: int = 320) -> Path:
    """Train a byte-level BPE and save it as ``save_pretrained`` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, "<|padding|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((sentence(i) for i in range(200)), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": END_OF_TEXT, "pad_token": "<|padding|>", "mask_token": "<|mask|>"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    return directory
