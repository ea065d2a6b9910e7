"""Tests of the cache of prepared data: one process prepares it, and one that dies meanwhile leaves nothing
incomplete.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.sources.cache import cached_directory, fingerprint
from runtime.sources.errors import DataError, find_files
from runtime.sources.images import ImageArrays
from runtime.sources.megatron import MegatronDataset
from runtime.sources.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
PREPARE = """
import sys, time
from runtime.sources.cache import cached_directory

def compute(directory):
    (directory / "half").write_text(sys.argv[2])
    print("half", flush=True)
    time.sleep(float(sys.argv[3]))
    (directory / "whole").write_text(sys.argv[2])

report = lambda line: print(line, flush=True)
print((cached_directory(sys.argv[1], "key", compute, report) / "whole").read_text(), flush=True)
"""


def prepare(cache: Path, name: str, takes_s: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(cache), name, str(takes_s)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_dies_leaves_nothing_and_the_next_in_line_prepares(tmp_path: Path) -> None:
    first = prepare(tmp_path, "first", takes_s=600)
    assert said(first) == "half"
    second = prepare(tmp_path, "second", takes_s=0)
    assert said(second).startswith("waiting for another process, which prepares")
    assert not (tmp_path / "key").exists()
    first.kill()
    first.wait()
    assert [said(second), said(second)] == ["half", "second"]
    third = prepare(tmp_path, "third", takes_s=0)
    assert said(third) == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]
    for process in (first, second, third):
        process.communicate(timeout=60)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        cached_directory(str(tmp_path), "key", fail, print)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_prepared_data_is_found_where_nothing_can_be_written(tmp_path: Path) -> None:
    entry = cached_directory(str(tmp_path), "key", lambda directory: (directory / "a").touch(), print)
    tmp_path.chmod(0o500)
    try:
        found = cached_directory(str(tmp_path), "key", lambda _: pytest.fail("prepared twice"), print)
    finally:
        tmp_path.chmod(0o700)
    assert found == entry
    assert (entry / "a").exists()


@pytest.mark.parametrize(
    "open_files",
    [
        lambda path: find_files(path, "text"),
        lambda path: cached_directory(path, "key", lambda _: None, print),
        ImageArrays,
        lambda path: MegatronDataset(path, length=8),
        load_tokenizer,
    ],
)
def test_the_home_of_an_unknown_user_is_an_error_of_the_data(open_files: Callable[[str], object]) -> None:
    with pytest.raises(DataError, match="the home directory in ~nobody-here/x is not known here; write an"):
        open_files("~nobody-here/x")


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(DataError, match="no home directory for the cache of prepared data; choose"):
        cached_directory(None, "key", lambda _: None, print)


def test_fingerprints_are_equal_exactly_for_equal_facts() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert len({fingerprint(facts) for facts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"})}) == 4
