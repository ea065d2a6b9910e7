"""Recognition of events that arrive twice, by their ids: QoS 1 may deliver one twice, and a coordinator that
takes over from one that was killed publishes some again.
"""

from collections import OrderedDict

REMEMBERED = 10_000
"""Number of the newest ids that are remembered: more than a coordinator publishes at once after any failure."""


class DuplicateFilter:
    """The ids of events that have been seen."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def is_new(self, number: str) -> bool:
        """Return whether this id is new, and remember it. An event without an id, from an older version,
        always is.
        """
        if not number:
            return True
        if number in self._seen:
            return False
        if len(self._seen) >= REMEMBERED:
            self._seen.popitem(last=False)
        self._seen[number] = None
        return True
