"""Tests of text data sets: packed and separate documents, the cache, and errors in files and tokenizers."""

import gzip
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.sources.errors import DataError, find_files
from runtime.sources.text import TextDataset
from runtime.sources.tokenizer import load_tokenizer
from tests.helpers.corpus import END_OF_TEXT, make_tokenizer, sentence, write_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a default cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ftd"


def lines(tmp_path: Path, count: int = 40) -> str:
    return str(
        write_lines(
            tmp_path / "corpus.jsonl",
            [{"text": sentence(i), "id": i, "title": sentence(i)} for i in range(count)],
        )
    )


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
    with pytest.raises(
        DataError, match=r'corpus\.jsonl, line 1: there is no field "content".*"text", "id", "title"'
    ):
        TextDataset(str(path), tokenizer, length=16, field="content")
    with path.open("a") as stream:
        stream.write('{"text": \n')
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 41: this is not JSON"):
        TextDataset(str(path), tokenizer, length=16)
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []


TEXTS = [sentence(i, words=12) for i in range(30)]


def write_corpus(directory: Path, kind: str) -> str:
    """Write ``TEXTS`` as files of a kind, and return their pattern."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    records = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    directory.mkdir()
    match kind:
        case "jsonl":
            for part in range(3):
                write_lines(directory / f"part{part}.jsonl", records[10 * part : 10 * part + 10])
        case "jsonl.gz":
            plain = write_lines(directory / "all.txt", records)
            (directory / "all.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), directory / "all.parquet")
        case "arrow":
            datasets.Dataset.from_list(records).save_to_disk(directory)
        case "txt":
            for number, text in enumerate(TEXTS):
                (directory / f"{number:03}.txt").write_text(text)
    return str(directory / f"*.{kind}")


def test_inputs_that_cannot_be_looked_up_are_named() -> None:
    name = "x" * 300
    with pytest.raises(DataError, match=f"text file {name} cannot be read: File name too long"):
        find_files(name, "text file")
    with pytest.raises(DataError, match=f"the tokenizer {name} cannot be read: .*File name too long"):
        load_tokenizer(name)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow", "txt"])
def test_files_of_every_kind_have_the_same_samples(tmp_path: Path, tokenizer: str, kind: str) -> None:
    dataset = TextDataset(write_corpus(tmp_path / "corpus", kind), tokenizer, length=512, packing=False)
    assert [decode(tokenizer, sample["input_ids"].tolist()) for sample in dataset] == [
        text + END_OF_TEXT for text in TEXTS
    ]


def test_documents_without_text_are_left_out(tmp_path: Path, tokenizer: str) -> None:
    path = write_lines(tmp_path / "corpus.jsonl", [{"text": "a"}, {"text": ""}, {"text": "b"}])
    with path.open("a") as stream:
        stream.write('\n   \n{"text": "c"}')
    dataset = TextDataset(str(path), tokenizer, length=8, packing=False)
    assert [decode(tokenizer, sample["input_ids"].tolist())[0] for sample in dataset] == ["a", "b", "c"]


def test_the_token_for_the_end_of_a_text(tmp_path: Path, tokenizer: str) -> None:
    path = str(write_lines(tmp_path / "corpus.jsonl", [{"text": "a"}, {"text": "b"}]))

    def text(end_of_text: bool | str) -> str:
        dataset = TextDataset(path, tokenizer, length=2, end_of_text=end_of_text)
        return decode(tokenizer, [int(token) for sample in dataset for token in sample["input_ids"]])

    assert text(True) == f"a{END_OF_TEXT}b{END_OF_TEXT}"
    assert text(False) == "ab"
    assert text("<|mask|>") == "a<|mask|>b<|mask|>"
    with pytest.raises(DataError, match=r"end_of_text '</s>' is no token of the tokenizer .*tokenizer\.json"):
        text("</s>")


def test_the_tokenizers_special_tokens_are_in_separate_documents(tmp_path: Path, tokenizer: str) -> None:
    from tokenizers import Tokenizer, processors

    directory = shutil.copytree(tokenizer, tmp_path / "template")
    changed = Tokenizer.from_file(str(directory / "tokenizer.json"))
    changed.post_processor = processors.TemplateProcessing(
        single="<|mask|> $A <|endoftext|>", special_tokens=[("<|mask|>", 2), (END_OF_TEXT, 0)]
    )
    changed.enable_padding(length=64)
    changed.enable_truncation(3)
    changed.save(str(directory / "tokenizer.json"))
    path = str(write_lines(tmp_path / "corpus.jsonl", [{"text": TEXTS[0]}, {"text": "b"}]))
    dataset = TextDataset(path, str(directory), length=10, packing=False)
    assert decode(str(directory), dataset[1]["input_ids"].tolist()) == f"<|mask|>b{END_OF_TEXT}"
    assert len(dataset[0]["input_ids"]) == 10
    cut = decode(str(directory), dataset[0]["input_ids"].tolist())
    assert cut.startswith("<|mask|>the") and cut.endswith(END_OF_TEXT)
    packed = TextDataset(path, str(directory), length=2)
    assert "<|mask|>" not in decode(str(directory), packed[0]["input_ids"].tolist())


def test_changed_files_tokenizers_and_arguments_are_tokenised_again(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path)

    def is_made(**arguments: Any) -> bool:
        TextDataset(**{"files": path, "tokenizer": tokenizer, "length": 16, **arguments})
        return "tokenised" in capsys.readouterr().err

    assert is_made() and not is_made() and not is_made(length=20)
    assert is_made(end_of_text=False)
    assert is_made(field="title")
    assert is_made(tokenizer=str(make_tokenizer(tmp_path / "other", vocabulary=300)))
    assert is_made(packing=False) and not is_made(packing=False)
    assert is_made(packing=False, length=20)
    write_lines(Path(path), [{"text": sentence(i)} for i in range(41)])
    assert is_made()
    assert is_made(cache_directory=str(tmp_path / "elsewhere"))


def test_a_tokenizer_that_cannot_be_used(tmp_path: Path, tokenizer: str) -> None:
    path = lines(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer .*gone does not exist"):
        TextDataset(path, str(tmp_path / "gone"), length=16)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "vocab.txt").touch()
    with pytest.raises(DataError, match=r"empty has no tokenizer.json \(it has vocab.txt\); write one with"):
        TextDataset(path, str(tmp_path / "empty"), length=16)
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"empty/tokenizer\.json is not a tokenizer"):
        TextDataset(path, str(tmp_path / "empty"), length=16)
    nameless = shutil.copytree(tokenizer, tmp_path / "nameless")
    content = (nameless / "tokenizer.json").read_text().replace(END_OF_TEXT, "<|x|>")
    (nameless / "tokenizer.json").write_text(content.replace("<|padding|>", "<|y|>"))
    with pytest.raises(
        DataError, match="names no token for the end of a text; set end_of_text to one of its"
    ):
        TextDataset(path, str(nameless), length=16)
    dataset = TextDataset(path, str(nameless), length=16, packing=False, end_of_text=False)
    with pytest.raises(DataError, match="has neither a padding token nor one for the end of a text"):
        dataset.pad_collate()
    (nameless / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is corrupt"):
        TextDataset(path, str(nameless), length=16)


DAMAGED_GZIP = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20
"""A header of gzip, the same whenever it is made, since it is in the names of tests; and a block of an unknown kind."""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n[1]\n',
            r"a\.jsonl, line 2: each line must be a JSON object .* not a list",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": 7}\n',
            r'line 3: the field "text" must be a string, not a int',
        ),
        ("a.jsonl", b'{"text": null}\n', r'line 1: the field "text" must be a string, not empty \(null\)'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: the tokenizer .* fails on this text"),
        ("a.jsonl", b"", "the files have no text, so there are no tokens"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", DAMAGED_GZIP, r"a\.jsonl\.gz cannot be read: Error -3 while decompressing"),
        ("a.txt.gz", DAMAGED_GZIP, r"a\.txt\.gz cannot be read: Error -3 while decompressing"),
        ("a.parquet", b"no parquet", r"a\.parquet cannot be read as Parquet"),
        ("a.arrow", b"no arrow", r"a\.arrow cannot be read as an Arrow stream"),
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8 text \(byte 2\)"),
        ("a.txt", b"short", r"there is no sample of 16 tokens: the longest source has \d+ tokens"),
    ],
)
def test_corpora_that_cannot_be_used(
    tmp_path: Path, tokenizer: str, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        TextDataset(str(tmp_path / name), tokenizer, length=16)


def test_a_column_that_is_missing(tmp_path: Path, tokenizer: str) -> None:
    for kind in ("parquet", "arrow"):
        pattern = write_corpus(tmp_path / kind, kind)
        with pytest.raises(DataError, match=r'there is no column "content"; the columns are "id", "text"'):
            TextDataset(pattern, tokenizer, length=16, field="content")


def test_a_cache_that_cannot_be_written(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"the cache .*file/cache cannot be written: .*choose another directory"
    ):
        TextDataset(lines(tmp_path), tokenizer, length=16, cache_directory=str(tmp_path / "file" / "cache"))


START = """
import sys
from runtime.sources.text import TextDataset
dataset = TextDataset(sys.argv[1], sys.argv[2], length=16)
print(len(dataset), dataset[len(dataset) - 1]["input_ids"].tolist())
"""


def start(path: str, tokenizer: str) -> "subprocess.Popen[str]":
    """Start a process that opens the data set as a trainer does."""
    return subprocess.Popen(
        [sys.executable, "-c", START, path, tokenizer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_of_trainers_that_start_together_one_tokenises(tmp_path: Path, tokenizer: str) -> None:
    path = str(write_lines(tmp_path / "corpus.jsonl", [{"text": sentence(i)} for i in range(3000)]))
    ended = [process.communicate(timeout=240) for process in [start(path, tokenizer) for _ in range(3)]]
    assert [err.count("tokenised 3000 documents") for _, err in ended].count(1) == 1
    assert sum(err.count("making tokens") for _, err in ended) == 1
    assert len({out for out, _ in ended}) == 1 and ended[0][0].strip()
