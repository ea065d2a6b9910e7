"""Tests of data sets of other libraries: those with len() and [i] work unchanged, others are rejected."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from runtime.data.batches import first_difference, leaves_of
from runtime.data.loader import BatchLoader
from runtime.data.reading import BatchReader
from runtime.data.sampling import Sampler
from runtime.errors import TrainingError

LENGTH = 20


def rows_of(name: str) -> list[dict[str, Any]]:
    return [
        {"ids": [i, i + 1, i + 2], "label": i, "weight": i / 2, "text": f"{name} {i}"} for i in range(LENGTH)
    ]


def hugging_face() -> Any:
    return datasets.Dataset.from_list(rows_of("hub"))


def hugging_face_in_torch() -> Any:
    return hugging_face().with_format("torch", columns=["ids", "label"])


def hugging_face_from_disk(directory: Path) -> Any:
    hugging_face().save_to_disk(directory / "saved")
    return datasets.load_from_disk(directory / "saved").with_transform(shift)


def shift(columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {"ids": torch.tensor(columns["ids"]) + 1}


class Streaming(IterableDataset[Any]):
    """A subclass of torch's stream that can nevertheless be indexed, like MosaicML's ``StreamingDataset``."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": np.arange(index, index + 3, dtype=np.uint16)}

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("nobody iterates")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "Hugging Face, lists": lambda _: hugging_face(),
    "Hugging Face, tensors": lambda _: hugging_face_in_torch(),
    "Hugging Face, memory-mapped, transformed": hugging_face_from_disk,
    "TensorDataset": lambda _: TensorDataset(torch.arange(LENGTH), torch.rand(LENGTH, 2)),
    "Subset": lambda _: Subset(TensorDataset(torch.arange(2 * LENGTH)), range(LENGTH)),
    "numpy array": lambda _: np.arange(LENGTH * 2, dtype=np.float32).reshape(LENGTH, 2),
    "list of dicts": lambda _: rows_of("list"),
    "tensor": lambda _: torch.rand(LENGTH, 3),
    "MosaicML streaming": lambda _: Streaming(),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", SOURCES)
def test_map_style_sources_work_as_they_are(source: str, workers: int, tmp_path: Path) -> None:
    dataset = SOURCES[source](tmp_path)
    assert (
        dataset[0] is not None
    )  # A job is prepared in this way: libraries may start threads, which do not exist after a fork.
    sampler = Sampler(LENGTH, 8, 1)
    loader = BatchLoader(BatchReader(dataset, None, sampler, microbatch_rows=4, seed=1), workers=workers)
    try:
        batch = loader.load(2, 1)
    finally:
        loader.close()
    indices = sampler.indices(2)[4:]
    tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    assert tensors and {len(tensor) for tensor in tensors} == {4}
    samples = [dataset[index] for index in indices]
    if isinstance(samples[0], dict):
        assert batch["ids"].tolist() == [list(map(int, sample["ids"])) for sample in samples]
        assert batch["ids"].dtype == torch.int64
    if source == "Hugging Face, lists":
        assert batch["text"] == [sample["text"] for sample in samples]
        assert batch["label"].tolist() == indices and batch["weight"].tolist() == [i / 2 for i in indices]
    if source == "TensorDataset":
        assert isinstance(batch, tuple) and batch[0].tolist() == indices
    if source == "numpy array":
        assert torch.equal(batch, torch.from_numpy(np.stack(samples)))


def test_a_hugging_face_collator_masks_alike_in_workers() -> None:
    """The tokenizer was used in the trainer before, and the collator draws random numbers."""
    words = [f"word{i}" for i in range(40)]
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    vocabulary = {word: i for i, word in enumerate([*special.values(), *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer([" ".join(words)] * 100)
    rows = [{"text": " ".join(words[i : i + 5 + i % 3])} for i in range(LENGTH)]
    dataset = datasets.Dataset.from_list(rows).with_transform(lambda columns: tokenizer(columns["text"]))
    masking = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
    batches = []
    for workers in (0, 2):
        sampler = Sampler(LENGTH, 8, 1)
        reader = BatchReader(dataset, masking, sampler, microbatch_rows=4, seed=1)
        loader = BatchLoader(reader, workers=workers)
        try:
            batches.append([loader.load(step, 0) for step in range(1, 5)])
        finally:
            loader.close()
    assert first_difference(*batches) is None
    assert all((batch["labels"] != -100).any() and len(batch["attention_mask"]) == 4 for batch in batches[0])
    assert len({tuple(batch["input_ids"].flatten().tolist()) for batch in batches[0]}) == 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return 3


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class BadLength(NoLength):
    def __len__(self) -> int:
        raise OSError("index file is missing")


WAY_OUT = r"a step uses follows from \(seed, step\).*impossible in a stream.*without streaming=True"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Stream, f"is a Stream, which has no __len__ and no __getitem__.*{WAY_OUT}"),
        (StreamOfKnownLength, f"which has no __getitem__.*{WAY_OUT}"),
        (NoLength, f"which has no __len__.*{WAY_OUT}"),
        (lambda: iter([1, 2]), f"is a list_iterator, which has no .*{WAY_OUT}"),
        (lambda: (i for i in range(3)), f"is a generator, which has no .*{WAY_OUT}"),
        (lambda: hugging_face().to_iterable_dataset(), f"is an IterableDataset, which has no .*{WAY_OUT}"),
        (Dataset, "which has no __len__ and no __getitem__"),
        (lambda: DataLoader([1, 2, 3]), "is a DataLoader; pass the loader's dataset"),
        (
            lambda: datasets.DatasetDict(train=hugging_face()),
            r"is a DatasetDict with 'train'; .*dataset\['train'\]",
        ),
        (lambda: [], "is empty"),
        (
            BadLength,
            r"len\(\) of .* raised OSError: index file is missing \(test_data_sources.py, line \d+, in",
        ),
    ],
)
def test_data_that_cannot_be_indexed_is_rejected_with_a_remedy(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TrainingError, match=f"(?s){said}"):
        BatchReader(make(), None, Sampler(3, 2, 1), microbatch_rows=1, seed=1)
