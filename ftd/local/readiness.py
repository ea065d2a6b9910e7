"""Which nodes of a cluster on this machine can take a job: healthy, each with all its trainers up."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ftd.errors import PeerError

NODES_START_S = 60.0


class Readiness:
    """Fed with events and states; see ``missing``."""

    def __init__(self, devices_per_node: int) -> None:
        self._devices = devices_per_node
        self._trainers: dict[str, set[int]] = {}
        self._news = asyncio.Event()
        self.state: Mapping[str, Any] = {}
        """The cluster's, as it was published last."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Devices of each node whose trainer was up at some time count."""
        if event.get("event") == "TrainerStarted":
            self._trainers.setdefault(event["node"], set()).add(event["details"]["device"])
            self._news.set()

    def on_state(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self._news.set()

    def forget(self, name: str) -> None:
        """A new daemon is started under this name."""
        self._trainers.pop(name, None)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those among ``names`` that cannot take a job yet."""
        nodes = self.state.get("nodes") or {}
        return [
            name
            for name in names
            if nodes.get(name, {}).get("state") != "HEALTHY"
            or len(self._trainers.get(name, ())) < self._devices
        ]

    async def wait(self, names: Sequence[str], limit_s: float = NODES_START_S) -> None:
        """:raises PeerError: they are not ready within ``limit_s``; names the first that is not."""
        try:
            async with asyncio.timeout(limit_s):
                while self.missing(names):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            if late := self.missing(names):  # The news may have come with the end of the wait.
                raise PeerError(f"{late[0]} was not ready within {limit_s:g} s") from None
