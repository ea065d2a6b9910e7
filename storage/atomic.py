"""Files that are there as a whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces ``path`` when the block ends without an error, and is removed
    otherwise.

    :raises OSError: the file cannot be replaced; what was there stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that a user named. It replaces the target of a link, not the link, and is written in place if it
    is a device such as ``/dev/null``, or if no other file may be made in its directory.

    :raises OSError: the file cannot be written; what was there stays where it can.
    """
    place = Path(os.path.realpath(path))
    if (place.exists() and not place.is_file()) or not os.access(place.parent, os.W_OK):
        place.write_bytes(content)
        return
    with atomic_file(place) as draft:
        draft.write_bytes(content)
        if place.exists():
            shutil.copymode(place, draft)
