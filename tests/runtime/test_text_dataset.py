"""Text data sets: packed and separate documents, the cache, and what is wrong with files and tokenizers."""

from pathlib import Path

import pytest

from runtime.sources.errors import DataError
from runtime.sources.text import TextDataset
from tests.runtime.corpus import END_OF_TEXT, make_tokenizer, sentence, write_lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default cache of a test is its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ftd"


def lines(tmp_path: Path, count: int = 40) -> str:
    return str(write_lines(tmp_path / "corpus.jsonl", [{"text": sentence(i), "id": i} for i in range(count)]))


def decode(tokenizer: str, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    text: str = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").decode(ids, skip_special_tokens=False)
    return text


def test_packed_samples_are_the_documents_one_after_the_other(tmp_path: Path, tokenizer: str) -> None:
    dataset = TextDataset(lines(tmp_path), tokenizer, length=16)
    joined = "".join(sentence(i) + END_OF_TEXT for i in range(40))
    text = decode(tokenizer, [int(token) for sample in dataset for token in sample["input_ids"]])
    assert len(joined) - 64 < len(text) <= len(joined)
    assert joined.startswith(text)
    assert all(sample["input_ids"].tolist() == sample["labels"].tolist() for sample in dataset)
    assert all(len(sample["input_ids"]) == 16 for sample in dataset)


def test_a_document_is_a_sample_without_packing(tmp_path: Path, tokenizer: str) -> None:
    dataset = TextDataset(lines(tmp_path), tokenizer, length=512, packing=False)
    assert len(dataset) == 40
    assert decode(tokenizer, dataset[7]["input_ids"].tolist()) == sentence(7) + END_OF_TEXT
    short = TextDataset(lines(tmp_path), tokenizer, length=5, packing=False)
    assert {len(sample["input_ids"]) for sample in short} == {5}
    assert short[7]["input_ids"].tolist() == dataset[7]["input_ids"].tolist()[:5]


def test_batches_of_documents_are_padded(tmp_path: Path, tokenizer: str) -> None:
    dataset = TextDataset(lines(tmp_path), tokenizer, length=512, packing=False)
    samples = [dataset[3], dataset[39]]
    batch = dataset.pad_collate()(samples)
    for row, sample in enumerate(samples):
        size = len(sample["input_ids"])
        assert batch["input_ids"][row, :size].tolist() == sample["input_ids"].tolist()
        assert set(batch["input_ids"][row, size:].tolist()) <= {1}
        assert set(batch["labels"][row, size:].tolist()) <= {-100}
        assert batch["attention_mask"][row].tolist() == [1] * size + [0] * (
            batch["input_ids"].shape[1] - size
        )


def test_a_token_outside_the_vocabulary_is_named_with_its_document(tmp_path: Path, tokenizer: str) -> None:
    dataset = TextDataset(lines(tmp_path), tokenizer, length=16)
    dataset.check_vocabulary(dataset.max_token_id() + 1)
    with pytest.raises(DataError, match=rf"corpus\.jsonl, line \d+: .* token id {dataset.max_token_id()}"):
        dataset.check_vocabulary(dataset.max_token_id())


def test_the_second_time_nothing_is_tokenised(
    tmp_path: Path, tokenizer: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path)
    first = TextDataset(path, tokenizer, length=16)
    assert "tokenised 40 documents" in capsys.readouterr().err
    second = TextDataset(path, tokenizer, length=8)
    assert capsys.readouterr().err == ""
    assert second[0]["input_ids"].tolist() == first[0]["input_ids"].tolist()[:8]
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1


def test_files_that_cannot_be_used(tmp_path: Path, tokenizer: str, cache: Path) -> None:
    with pytest.raises(DataError, match=r"text file .*gone\.jsonl does not exist"):
        TextDataset(str(tmp_path / "gone.jsonl"), tokenizer, length=16)
    path = Path(lines(tmp_path))
    with pytest.raises(DataError, match=r'corpus\.jsonl, line 1: there is no field "content".*"text", "id"'):
        TextDataset(str(path), tokenizer, length=16, field="content")
    with path.open("a") as stream:
        stream.write('{"text": \n')
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 41: this is not JSON"):
        TextDataset(str(path), tokenizer, length=16)
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []
