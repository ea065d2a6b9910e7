"""Message faults between a node and the coordinator: messages are dropped, duplicated or delayed.

Neither the broker nor TCP loses messages, so the faults are injected where signals leave the node and where
commands reach it. Each direction keeps its order, as MQTT promises for one sender.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """Probability of each fault for a message, and the longest delay."""

    drop: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0


class FaultyLink:
    """One direction of the connection."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._faults: LinkFaults | None = None
        self._random = Random(0)

    def begin(self, faults: LinkFaults, seed: str) -> None:
        """Inject these faults from now on. The same seed treats the same messages in the same way."""
        self._faults, self._random = faults, Random(seed)

    def end(self) -> None:
        """Inject no more faults. Delayed messages are still delivered."""
        self._faults = None

    @property
    def is_faulty(self) -> bool:
        """Return whether a message that is delivered now may be lost, repeated or late."""
        return self._faults is not None or bool(self._queue)

    def deliver(self, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` now, later, twice or never."""
        if not self.is_faulty:
            deliver()
            return
        faults = self._faults or LinkFaults()
        lost = self._random.random() < faults.drop
        times = 2 if self._random.random() < faults.duplicate else 1
        late_s = self._random.uniform(0.0, faults.late_s)
        if lost:
            return
        now = asyncio.get_running_loop().time()
        self._queue += [(now + late_s, deliver)] * times
        if self._timer is None:
            self._drain()

    def _drain(self) -> None:
        """Deliver what is due, in order: a delayed message holds up those after it."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._queue:
            due, deliver = self._queue[0]
            if due > loop.time():
                self._timer = loop.call_at(due, self._drain)
                return
            self._queue.popleft()
            deliver()


class MessageFaultInjector:
    """Both directions of one node. Messages pass unchanged until ``begin`` is called."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.outgoing, self.incoming = FaultyLink(), FaultyLink()
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_faulty(self) -> bool:
        """Return whether a message in either direction may be lost, repeated or late."""
        return self.outgoing.is_faulty or self.incoming.is_faulty

    def begin(self, faults: LinkFaults, *, seed: int, for_s: float) -> None:
        """Inject faults for ``for_s``. A later call replaces an earlier one."""
        if self._end is not None:
            self._end.cancel()
        for name, wire in (("out", self.outgoing), ("in", self.incoming)):
            wire.begin(faults, f"{seed}/{self._node}/{name}")
        self._end = asyncio.get_running_loop().call_later(for_s, self.end)

    def end(self) -> None:
        """Let messages pass unchanged again."""
        self.outgoing.end()
        self.incoming.end()
