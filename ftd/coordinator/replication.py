"""The leader's journal at the broker, where a standby reads it; the broker may refuse a large one.

mosquitto ends the connection of a client that sends more than ``max_packet_size``, and acknowledges and
drops what exceeds ``message_size_limit``. A journal that comes back to its sender was not refused.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from ftd.transport.mqtt.session import ECHO_S

_log = structlog.get_logger("ftd.leadership")

MAX_UNCONFIRMED = 64
"""Journals that are remembered until the broker sends them back."""


class JournalReplication:
    """The publisher of the journal. Journals of a size that the broker refuses are withheld."""

    def __init__(self, topic: str, publish: Callable[..., None]) -> None:
        """Begin with nothing known of the broker.

        :param publish: publishes as the leader, as ``Leadership.publish``.
        """
        self._topic, self._publish = topic, publish
        self._unconfirmed: deque[bytes] = deque(maxlen=MAX_UNCONFIRMED)
        self._suspected_bytes = self._refused_bytes = 0
        """Sizes that seem to be refused, after one attempt and after two in a row; 0: none. A connection may
        end for any reason while a journal is under way.
        """

    def publish(self, journal: bytes) -> None:
        """Publish the encoded journal, or delete the one at the broker if it would refuse this one."""
        if 0 < self._refused_bytes <= len(journal):
            self.withdraw()
            return
        self._unconfirmed.append(journal)
        self._publish(self._topic, journal, retain=True, on_done=lambda: self._expect(journal))

    def withdraw(self) -> None:
        """Delete an older journal at the broker, from which no standby must begin. The one on this host holds
        the new state.
        """
        self._publish(self._topic, b"", retain=True)

    def receive(self, journal: bytes) -> None:
        """Take a journal that the broker sends back."""
        if journal in self._unconfirmed:
            self._unconfirmed.remove(journal)
            if len(journal) >= self._suspected_bytes:
                self._suspected_bytes = 0

    def end_session(self) -> None:
        """Note that the broker ended the session: a journal may have been the reason."""
        sizes = [len(journal) for journal in self._unconfirmed]
        self._unconfirmed.clear()
        if sizes:
            self._suspect(max(sizes))
        else:
            self._suspected_bytes = 0

    def leave_session(self) -> None:
        """Note that this coordinator ended the session itself."""
        self._unconfirmed.clear()

    def forget_limit(self) -> None:
        """Note that the broker is gone; it may come back with another limit."""
        self._suspected_bytes = self._refused_bytes = 0

    def _expect(self, journal: bytes) -> None:
        asyncio.get_running_loop().call_later(ECHO_S, self._note_missing, journal)

    def _note_missing(self, journal: bytes) -> None:
        if journal in self._unconfirmed:
            self._unconfirmed.remove(journal)
            self._suspect(len(journal))

    def _suspect(self, size: int) -> None:
        if not self._suspected_bytes:
            self._suspected_bytes = size
            return
        self._refused_bytes = min(size, self._suspected_bytes)
        words: dict[str, Any] = {
            "size_bytes": self._refused_bytes,
            "remedy": "raise the broker's limit (mosquitto: max_packet_size, message_size_limit) and restart it; "
            "training continues, and no standby can take over until then",
        }
        _log.error("journal_refused_by_broker", **words)
        self.withdraw()
