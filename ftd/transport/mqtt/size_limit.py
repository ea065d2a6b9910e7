"""The size from which on a broker refuses messages. MQTT 3.1.1 does not say it, so it is found out.

mosquitto ends the connection of a client that sends more than ``max_packet_size``. Sent again, the message would
end the next connection, too, and so on without end. What exceeds ``message_size_limit`` is acknowledged and dropped:
it does not come back to a client that subscribed to its topic.
"""

import time

import structlog

from ftd.transport.rate_limited_log import RateLimitedLog

_log = structlog.get_logger("ftd.transport.mqtt")

LEAST_BYTES = 4096
"""Least size that is suspected: connections end for other reasons while small messages are under way."""
FIRST_RETRY_S, LAST_RETRY_S = 60.0, 3600.0
"""Times after which a refused size is tried again; they double up to the last."""


class SizeLimit:
    """The limit of one broker, as the sessions of a process find it out.

    A size is refused after two failures in a row, since a connection may end for any reason while a message is under
    way, and a message may come back late. Two in a row may be chance as well, for example while coordinators take the
    leader's client id from each other. So the size is tried again after a while, and one failure is then enough.
    """

    def __init__(self) -> None:
        """Begin with nothing known of the broker."""
        self._refused = 0
        """Least size that is refused; 0: none."""
        self._ended = self._dropped = 0
        """Sizes that were under way when a connection ended, and that did not come back; 0: none."""
        self._retry_s, self._retry_at = FIRST_RETRY_S, 0.0
        self._dropped_log = RateLimitedLog(_log, "message_too_large_for_broker")

    def refuses(self, size: int) -> bool:
        """Return whether the broker refuses a message of this size."""
        if self._refused and time.monotonic() >= self._retry_at:
            self._ended = self._dropped = self._refused
            self._refused = 0
        return 0 < self._refused <= size

    def log_refused(self, topic: str, size: int) -> None:
        """Log that a message is not sent because of its size."""
        self._dropped_log.warn(topic=topic, size_bytes=size, refused_from_bytes=self._refused)

    def note_acknowledged(self, size: int) -> None:
        """Note that the broker acknowledged a message, whether or not it dropped it."""
        if size >= self._ended:
            self._ended = 0

    def note_returned(self, size: int) -> None:
        """Note that a message came back, possibly late."""
        if size >= self._dropped:
            self._dropped = 0
        if size >= self._refused:
            self._refused = 0

    def note_missing(self, topic: str, size: int) -> None:
        """Note that a message was acknowledged and did not come back."""
        self._dropped = self._suspect(self._dropped, topic, size)

    def note_end(self, topic: str, size: int) -> None:
        """Note that a connection ended.

        :param topic: topic of the largest message that was not acknowledged.
        :param size: its size; 0: there was none. The broker then had another reason, such as a restart, after which
            its limit may be another one.
        """
        if size < LEAST_BYTES:
            self._ended = self._dropped = self._refused = 0
            self._retry_s = FIRST_RETRY_S
        else:
            self._ended = self._suspect(self._ended, topic, size)

    def _suspect(self, before: int, topic: str, size: int) -> int:
        """Return the size to remember as the last failure."""
        if not before:
            return size
        self._refused = min(size, before)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        _log.error(
            "message_refused_by_broker",
            topic=topic,
            size_bytes=self._refused,
            remedy="raise the broker's limit (mosquitto: max_packet_size, message_size_limit) and restart it; messages "
            "of this size are dropped, and one is tried again now and then",
        )
        return 0
