"""Imports of the modules of a daemon."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ftd.garbage import rare_collections


@contextmanager
def quick_imports() -> Iterator[None]:
    """Make imports of modules that stay quicker, by a fifth.

    Python searches for reference cycles rarely meanwhile. structlog does without rich, which it would import for
    colourful tracebacks on a terminal; the modules that are imported here must not need rich either.
    """
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]  # None: not importable.
    modules.setdefault("rich", None)
    try:
        with rare_collections():
            yield
    finally:
        if modules["rich"] is None:
            del modules["rich"]
