"""Chaos on the way between a node and the coordinator: messages are lost, come twice, come late.

The broker and TCP do none of that; it is done where signals leave the node and commands reach it. What the
coordinator says keeps its order, and so does what the node says: MQTT promises that of one sender.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """Probabilities for each message, and by how much it is late at most."""

    drop: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0


class FaultyLink:
    """One direction."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._weather: LinkFaults | None = None
        self._random = Random(0)

    def begin(self, weather: LinkFaults, seed: str) -> None:
        """From now on; the same seed treats the same messages in the same way."""
        self._weather, self._random = weather, Random(seed)

    def end(self) -> None:
        """What is under way still comes."""
        self._weather = None

    def carry(self, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` now, or later, or twice, or never."""
        weather = self._weather
        if weather is None:
            lost, times, late_s = False, 1, 0.0
        else:
            lost = self._random.random() < weather.drop
            times = 2 if self._random.random() < weather.duplicate else 1
            late_s = self._random.uniform(0.0, weather.late_s)
        if lost:
            return
        now = asyncio.get_running_loop().time()
        self._queue += [(now + late_s, deliver)] * times
        if self._timer is None:
            self._drain()

    def _drain(self) -> None:
        """What is due, in order: whoever is late holds up those behind."""
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
    """Both directions of one node; fair unless ``begin`` says otherwise."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.outgoing, self.incoming = FaultyLink(), FaultyLink()
        self._end: asyncio.TimerHandle | None = None

    def begin(self, weather: LinkFaults, *, seed: int, for_s: float) -> None:
        """For so long; a later one takes the place of an earlier one."""
        if self._end is not None:
            self._end.cancel()
        for name, wire in (("out", self.outgoing), ("in", self.incoming)):
            wire.begin(weather, f"{seed}/{self._node}/{name}")
        self._end = asyncio.get_running_loop().call_later(for_s, self.end)

    def end(self) -> None:
        """Fair again."""
        self.outgoing.end()
        self.incoming.end()
