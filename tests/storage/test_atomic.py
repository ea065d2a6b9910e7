"""Tests of files that are replaced as a whole."""

import errno
import os
from pathlib import Path

import pytest

from storage.atomic import write_whole


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_whole(path, b"earlier")
    path.chmod(0o600)

    def write(draft: Path, content: bytes) -> int:
        draft.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(Path, "write_bytes", write)
        write_whole(path, b"new")
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target")
    write_whole(link, b"content")
    assert link.is_symlink() and (tmp_path / "target").read_bytes() == b"content"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"content")
    assert pipe.is_fifo() and os.read(reader, 100) == b"content"
    os.close(reader)
