"""Tests of ``ftd data``: a tokenizer and a token file of the standard library's sources, without torch."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from runtime.sources.text import TextDataset
from runtime.sources.token_file import TokenFile
from tests.helpers.commands import ftd_here
from tests.helpers.corpus import make_tokenizer, sentence, write_lines

pytestmark = pytest.mark.processes

SOURCES = str(Path(sysconfig.get_paths()["stdlib"]) / "[a-c]*.py")
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from ftd.cli.main import main
sys.argv[0] = "ftd"
main()
"""


def ftd_without_torch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "COLUMNS": "200"},
    )


def test_a_corpus_becomes_a_tokenizer_and_a_token_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer, out = str(tmp_path / "tokenizer"), tmp_path / "tokens.bin"
    trained = ftd_without_torch(
        "data", "train-tokenizer", SOURCES, "--vocabulary", "1000", "--out", tokenizer
    )
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == f"{tokenizer}: a tokenizer with 1000 tokens\n"
    made = ftd_without_torch("data", "tokenize", SOURCES, "--tokenizer", tokenizer, "--out", str(out))
    assert made.returncode == 0, made.stderr
    assert "tokens (uint16) of" in made.stdout and "vocabulary has 1000" in made.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer", "tokens.bin", "tokens.bin.json"]

    dataset = TokenFile(str(out), length=128)
    text = TextDataset(SOURCES, tokenizer, length=128, cache_directory=str(tmp_path / "cache"))
    assert len(dataset) == len(text) > 500
    for index in (0, len(text) // 2, -1):
        assert dataset[index]["input_ids"].tolist() == text[index]["input_ids"].tolist()
    assert dataset.max_token_id() == text.max_token_id() == 999

    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(tokenizer)
    assert (len(reader), reader.eos_token_id, reader.pad_token_id, reader.mask_token_id) == (1000, 0, 1, 2)
    sources = sorted(Path(SOURCES).parent.glob(Path(SOURCES).name))
    start = reader.decode(dataset[0]["input_ids"])
    assert sources[0].read_text().startswith(start) and len(start) > 128


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return str(write_lines(tmp_path / "corpus.jsonl", [{"content": sentence(i)} for i in range(40)]))


def test_documents_may_end_with_another_token_or_none(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = str(make_tokenizer(tmp_path / "tokenizer")), str(tmp_path / "tokens.bin")
    command = ["data", "tokenize", corpus, "--field", "content", "--tokenizer", tokenizer, "--out", out]

    def count(token: int, *options: str) -> int:
        code, _, err = ftd_here(*command, "--overwrite", *options, patch=monkeypatch, said=capsys)
        assert code == 0, err
        return sum(sample["input_ids"].tolist().count(token) for sample in TokenFile(out, length=1))

    assert (count(0), count(0, "--no-end-of-text")) == (40, 0)
    assert (count(2, "--end-of-text", "<|mask|>"), count(0, "--end-of-text", "<|mask|>")) == (40, 0)


def test_facts_that_contradict_the_token_file_are_an_error(tmp_path: Path, corpus: str) -> None:
    from runtime.sources.errors import DataError

    tokenizer, out = str(make_tokenizer(tmp_path / "tokenizer")), tmp_path / "tokens.bin"
    made = ["data", "tokenize", corpus, "--field", "content", "--tokenizer", tokenizer, "--out", str(out)]
    assert ftd_without_torch(*made).returncode == 0
    with pytest.raises(DataError, match=r"tokens\.bin has tokens of the type uint16, not int32"):
        TokenFile(str(out), length=8, dtype="int32")
    facts = json.loads((tmp_path / "tokens.bin.json").read_text())
    (tmp_path / "tokens.bin.json").write_text(json.dumps({**facts, "tokens": facts["tokens"] + 1}))
    with pytest.raises(DataError, match=r"tokens\.bin has \d+ bytes, but tokens\.bin\.json says \d+"):
        TokenFile(str(out), length=8)
    (tmp_path / "tokens.bin.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokens\.bin\.json is corrupt"):
        TokenFile(str(out), length=8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["tokenize", "{corpus}", "--out", "{tmp}/a.bin"], 'corpus.jsonl, line 1: there is no field "text"'),
        (["tokenize", "{tmp}/*.txt", "--out", "{tmp}/a.bin"], "no text file matches"),
        (["tokenize", "{corpus}", "--out", "{tmp}/a.npy"], "--out: a token file has no header"),
        (
            ["tokenize", "{corpus}", "--out", "{corpus}", "--overwrite"],
            "--out: {corpus} is one of the text files",
        ),
        (
            ["tokenize", "{corpus}", "--out", "{tmp}/old.bin"],
            "--out: {tmp}/old.bin already exists (add --overwrite",
        ),
        (["tokenize", "{corpus}", "--out", "{tmp}/no/a.bin"], "--out: {tmp}/no/a.bin cannot be written"),
        (
            ["tokenize", "{corpus}", "--out", "{tmp}/a.bin", "--end-of-text", "a", "--no-end-of-text"],
            "--end-of-text: --end-of-text and --no-end-of-text exclude each other",
        ),
        (
            ["tokenize", "{corpus}", "--out", "{tmp}/a.bin", "--end-of-text", ""],
            "end_of_text '' is no token of the tokenizer",
        ),
        (["train-tokenizer", "{corpus}", "--out", "{tmp}/t"], "corpus.jsonl, line 1: there is no field"),
        (["train-tokenizer", "{tmp}/empty.txt", "--out", "{tmp}/t"], "the files have no text"),
        (
            ["train-tokenizer", "{tmp}/half.jsonl", "--out", "{tmp}/t"],
            "half.jsonl, line 1: this text is not valid Unicode",
        ),
        (
            ["train-tokenizer", "{corpus}", "--out", "{tmp}/t", "--vocabulary", "100"],
            "--vocabulary: 100 tokens are too few for all bytes and special tokens (give at least 259)",
        ),
    ],
)
def test_errors_name_the_problem_and_nothing_is_written(
    tmp_path: Path,
    corpus: str,
    options: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("old.bin", "empty.txt"):
        (tmp_path / name).touch()
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}')
    arguments = [option.format(corpus=corpus, tmp=tmp_path) for option in options]
    if options[0] == "tokenize":
        arguments += ["--tokenizer", str(make_tokenizer(tmp_path / "tokenizer"))]
    if "*.txt" in options[1]:
        (tmp_path / "empty.txt").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = ftd_here("data", *arguments, patch=monkeypatch, said=capsys)
    assert code == 2
    assert says.format(tmp=tmp_path, corpus=corpus) in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path, corpus: str) -> None:
    blocked = WITHOUT_TORCH.replace('sys.modules["torch"]', 'sys.modules["tokenizers"]')
    done = subprocess.run(
        [sys.executable, "-c", blocked, "data", "train-tokenizer", corpus, "--out", str(tmp_path / "t")],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 2
    assert "needs the package tokenizers" in done.stderr and "pip install tokenizers" in done.stderr
