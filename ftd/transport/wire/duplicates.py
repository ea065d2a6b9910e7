"""Events that come twice: QoS 1 may bring one again, and so may a coordinator that goes on where another one
was killed. They are known by their ids."""

from collections import deque

REMEMBERED = 10_000
"""Of the newest: more than a coordinator has to tell at once, whatever happened to the one before it."""


class DuplicateFilter:
    """Remembers ids."""

    def __init__(self) -> None:
        self._seen: deque[str] = deque()
        self._known: set[str] = set()

    def is_new(self, number: str) -> bool:
        """From now on it is not. What has no id (of a version without) always is."""
        if not number:
            return True
        if number in self._known:
            return False
        if len(self._seen) >= REMEMBERED:
            self._known.discard(self._seen.popleft())
        self._seen.append(number)
        self._known.add(number)
        return True
