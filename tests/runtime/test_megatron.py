"""Tests of Megatron's indexed data sets: documents are joined, and a corrupt index is rejected."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.sources.errors import DataError
from runtime.sources.megatron import MegatronDataset

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16", *, modes: bool = False
) -> str:
    """Write documents, each a list of sequences, as Megatron's preprocessing does."""
    sequences = [np.array(sequence, dtype=dtype) for document in documents for sequence in document]
    ends = np.cumsum([sequence.nbytes for sequence in sequences], dtype="<i8")
    boundaries = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    prefix.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(boundaries))
        + np.array([len(sequence) for sequence in sequences], dtype="<i4").tobytes()
        + (ends - [sequence.nbytes for sequence in sequences]).astype("<i8").tobytes()
        + boundaries.tobytes()
        + bytes(len(sequences) if modes else 0)
    )
    return str(prefix)


def documents(count: int = 12) -> list[list[list[int]]]:
    """Return documents of 0 to 3 sequences, some of them empty, whose tokens are 0, 1, 2 and so on."""
    made: list[list[list[int]]] = []
    token = 0
    for number in range(count):
        document = []
        for sequence in range(number % 4):
            size = (number * 3 + sequence * 5) % 11
            document.append([token + offset for offset in range(size)])
            token += size
        made.append(document)
    return made


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_all_documents_are_joined_and_cut(tmp_path: Path, dtype: str, modes: bool) -> None:
    tokens = [token for document in documents() for sequence in document for token in sequence]
    dataset = MegatronDataset(write_megatron(tmp_path / "corpus", documents(), dtype, modes=modes), length=7)
    assert len(tokens) > 60
    assert len(dataset) == len(tokens) // 7
    joined = [int(token) for sample in dataset for token in sample["input_ids"]]
    assert joined == tokens[: len(joined)]
    assert dataset[2]["labels"].tolist() == dataset[2]["input_ids"].tolist()
    assert dataset.max_token_id() == len(tokens) - 1


def test_sequences_need_not_lie_in_the_order_of_the_index(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5, 6]]])
    index = bytearray((tmp_path / "corpus.idx").read_bytes())
    index[-40:-24] = np.array([6, 0], dtype="<i8").tobytes()
    (tmp_path / "corpus.idx").write_bytes(index)
    assert MegatronDataset(prefix, length=6)[0]["input_ids"].tolist() == [4, 5, 6, 1, 2, 3]


def test_several_prefixes(tmp_path: Path) -> None:
    first = write_megatron(tmp_path / "first", [[[1, 2, 3, 4, 5]]])
    second = write_megatron(tmp_path / "second", [[[6, 7, 8, 9]]], "int32")
    dataset = MegatronDataset([first, f"{second}.idx"], length=4)
    assert [sample["input_ids"].tolist() for sample in dataset] == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    dataset = MegatronDataset(write_megatron(tmp_path / "corpus", [[[3, 9, 4, 1]]]), length=4)
    with pytest.raises(DataError, match=r"corpus\.bin, token 1: the token id 9 is outside"):
        dataset.check_vocabulary(9)


def test_files_that_are_missing_or_too_short(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.idx does not exist .* names gone\.bin and gone\.idx"):
        MegatronDataset(str(tmp_path / "gone"), length=4)
    prefix = write_megatron(tmp_path / "corpus", [[[3, 9, 4, 1]]])
    with pytest.raises(DataError, match=r"no sample of 5 tokens: .* 4 tokens in .*corpus\.bin"):
        MegatronDataset(prefix, length=5)
    empty = write_megatron(tmp_path / "empty", [])
    with pytest.raises(DataError, match="no sample of 5 tokens"):
        MegatronDataset(empty, length=5)
    with pytest.raises(DataError, match="no Megatron data is named"):
        MegatronDataset([], length=5)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, b"PK", "does not begin as a Megatron index does"),
        (9, b"\x02", "version 2, and only version 1 is known"),
        (17, b"\x07", "the type 7 of its tokens is none of whole numbers"),
        (18, b"\x09", r"but 9 sequences with 3 boundaries of documents need"),
        (34, b"\xff\xff\xff\xff", "a negative length or position"),
        (34, b"\xff\x00\x00\x00", r"sequence 0 ends after the 10 bytes of corpus\.bin"),
        (-8, b"\x01", "its documents do not cover its sequences in order"),
    ],
)
def test_a_corrupt_index_is_rejected(tmp_path: Path, place: int, value: bytes, says: str) -> None:
    prefix = write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]])
    index = bytearray((tmp_path / "corpus.idx").read_bytes())
    place %= len(index)
    index[place : place + len(value)] = value
    (tmp_path / "corpus.idx").write_bytes(index)
    with pytest.raises(DataError, match=rf"corpus\.idx is not a valid index: .*{says}"):
        MegatronDataset(prefix, length=4)


@pytest.mark.parametrize("size", [0, 5, 33, 60])
def test_a_truncated_index_is_rejected(tmp_path: Path, size: int) -> None:
    prefix = write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]])
    (tmp_path / "corpus.idx").write_bytes((tmp_path / "corpus.idx").read_bytes()[:size])
    with pytest.raises(DataError, match=r"corpus\.idx is not a valid index"):
        MegatronDataset(prefix, length=4)
