"""Python's search for reference cycles, in computations that allocate many objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS_BETWEEN_COLLECTIONS = 100_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python search for reference cycles rarely.

    Where many objects live until the next change, searching them again and again takes up to a third of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
