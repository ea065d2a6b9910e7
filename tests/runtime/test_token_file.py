"""Tests of flat token files: where samples begin, which types are read, and errors in files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.sources.errors import DataError
from runtime.sources.token_file import TokenFile


def token_file(path: Path, count: int, dtype: str = "uint16", first: int = 0) -> Path:
    np.arange(first, first + count).astype(dtype).tofile(path)
    return path


def test_a_file_is_cut_into_samples_of_equal_length(tmp_path: Path) -> None:
    dataset = TokenFile(str(token_file(tmp_path / "a.bin", 35)), length=10)
    assert len(dataset) == 3
    sample = dataset[1]
    assert sample.keys() == {"input_ids", "labels"}
    assert sample["input_ids"].dtype == torch.int64
    assert sample["input_ids"].tolist() == sample["labels"].tolist() == list(range(10, 20))
    assert dataset[-1]["input_ids"].tolist() == list(range(20, 30))
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int16", "int32", "int64"])
def test_every_type_is_read(tmp_path: Path, dtype: str) -> None:
    dataset = TokenFile(str(token_file(tmp_path / "a.bin", 24, dtype)), length=8, dtype=dtype)
    assert [int(sample["input_ids"][0]) for sample in dataset] == [0, 8, 16]
    assert dataset.max_token_id() == 23


def test_samples_may_overlap(tmp_path: Path) -> None:
    dataset = TokenFile(str(token_file(tmp_path / "a.bin", 20)), length=8, stride=4)
    assert [sample["input_ids"].tolist()[0] for sample in dataset] == [0, 4, 8, 12]


def test_several_files_follow_in_the_order_of_names_and_no_sample_crosses(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        token_file(tmp_path / f"part{number}.bin", 25, first=100 * number)
    token_file(tmp_path / "short.bin", 3)
    dataset = TokenFile([str(tmp_path / "part*.bin"), str(tmp_path / "short.bin")], length=10)
    assert [int(sample["input_ids"][0]) for sample in dataset] == [0, 10, 100, 110, 200, 210]


def test_a_numpy_file_has_its_own_type(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(70000, 70020, dtype=np.int32))
    dataset = TokenFile(str(tmp_path / "a.npy"), length=10)
    assert dataset[1]["input_ids"].tolist() == list(range(70010, 70020))
    with pytest.raises(DataError, match="has tokens of the type int32, not uint16; leave dtype out"):
        TokenFile(str(tmp_path / "a.npy"), length=10, dtype="uint16")


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    dataset = TokenFile(str(token_file(tmp_path / "a.bin", 64)), length=8)
    dataset.check_vocabulary(64)
    with pytest.raises(DataError, match=r"a\.bin, token 50: the token id 50 is outside .* 50 entries"):
        dataset.check_vocabulary(50)
    negative = TokenFile(str(token_file(tmp_path / "b.bin", 9, "int32", first=-5)), length=8, dtype="int32")
    with pytest.raises(DataError, match=r"b\.bin, token 0: the token id -5 is outside"):
        negative.check_vocabulary(50)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"token file .*gone\.bin does not exist"):
        TokenFile(str(tmp_path / "gone.bin"), length=8)
    with pytest.raises(DataError, match=r"no token file matches .*\*\.bin"):
        TokenFile(str(tmp_path / "*.bin"), length=8)
    with pytest.raises(DataError, match="is a directory, not a token file"):
        TokenFile(str(tmp_path), length=8)
    with pytest.raises(DataError, match="no token file is named"):
        TokenFile([], length=8)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DataError, match=r"empty\.bin is empty"):
        TokenFile(str(tmp_path / "empty.bin"), length=8)
    (tmp_path / "odd.bin").write_bytes(bytes(33))
    with pytest.raises(
        DataError, match=r"odd\.bin has 33 bytes, which are not whole tokens of the type uint16"
    ):
        TokenFile(str(tmp_path / "odd.bin"), length=8)
    np.save(tmp_path / "floats.npy", np.zeros(20))
    with pytest.raises(DataError, match=r"floats\.npy must be one row of whole numbers"):
        TokenFile(str(tmp_path / "floats.npy"), length=8)
    (tmp_path / "no.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"no\.npy is not a numpy array"):
        TokenFile(str(tmp_path / "no.npy"), length=8)


def test_numbers_that_make_no_sense(tmp_path: Path) -> None:
    path = str(token_file(tmp_path / "a.bin", 20))
    with pytest.raises(
        DataError, match=r"no sample of 21 tokens: the longest source has 20 tokens in .*a\.bin"
    ):
        TokenFile(path, length=21)
    with pytest.raises(DataError, match="length, the tokens of a sample, must be a whole number"):
        TokenFile(path, length=0)
    with pytest.raises(DataError, match="stride, the tokens between samples"):
        TokenFile(path, length=8, stride=0)
    with pytest.raises(DataError, match="the token type 'float32' is not one of uint8"):
        TokenFile(path, length=8, dtype="float32")
