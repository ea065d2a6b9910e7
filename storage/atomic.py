"""Files that are there as a whole or not at all."""

import contextlib
import os
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
