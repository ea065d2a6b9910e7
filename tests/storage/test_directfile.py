"""Files written past the page cache have the right bytes, also where the file system rejects direct writes."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import directfile
from storage.directfile import BUFFER_BYTES, write_synced


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a directory on a disk: other temporary files are in memory, which direct writes cannot bypass."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").glob("*")))


SIZES = [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 4097]


def data_of(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


def cut(data: bytes, size: int) -> Iterator[memoryview]:
    """Yield chunks, each of which is invalid as soon as the next is requested."""
    for start in range(0, len(data), size):
        piece = bytearray(data[start : start + size])
        yield memoryview(piece)
        piece[:] = bytes(len(piece))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [1 << 20, 3_333_333, 10 * BUFFER_BYTES])
def test_the_file_has_the_bytes_that_were_written(tmp_path: Path, size: int, piece: int) -> None:
    write_synced(tmp_path / "it", cut(data_of(size), piece))
    assert (tmp_path / "it").read_bytes() == data_of(size)


@pytest.mark.parametrize("refused", ["flag", "opening", "writing"])
def test_rejected_direct_writes_fall_back_to_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_write = os.open, os.pwrite
    direct: set[int] = set()

    def opened(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT and refused == "opening":
            raise OSError(errno.EINVAL, "refused")
        found = real_open(path, flags, *more)
        if flags & os.O_DIRECT:
            direct.add(found)
        return found

    def written(descriptor: int, data: Any, offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "refused")
        return real_write(descriptor, data, offset)

    if refused == "flag":
        monkeypatch.delattr("os.O_DIRECT")
    else:
        monkeypatch.setattr("os.open", opened)
        monkeypatch.setattr("os.pwrite", written)
    monkeypatch.setattr(directfile, "SYNC_BYTES", 2 * BUFFER_BYTES)
    write_synced(tmp_path / "it", cut(data_of(SIZES[-1]), 1 << 20))
    monkeypatch.undo()
    assert (tmp_path / "it").read_bytes() == data_of(SIZES[-1])
    assert refused != "writing" or direct


def test_a_full_disk_and_a_failing_source_end_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> Iterator[memoryview]:
        yield from cut(bytes(2 * BUFFER_BYTES), 1 << 20)
        raise LookupError("no more")

    before = descriptors()
    with pytest.raises(LookupError):
        write_synced(tmp_path / "it", failing())

    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_synced(tmp_path / "it", cut(bytes(9 * BUFFER_BYTES), 1 << 20))
    assert descriptors() == before
