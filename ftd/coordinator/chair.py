"""One taking of the seat: a session under the one client id of the cluster's leader, which never comes back
by itself. What the last leader left is read first; what else comes waits until the reign begins."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from ftd.config.address import BrokerAddress
from ftd.errors import WireError
from ftd.mqtt.session import MqttSession, Will
from ftd.wire.coordinators import JournalCopy, decode_copy, decode_leader, encode_unreachable, unpack
from ftd.wire.topics import Topics
from statemachine.election.leadership import Leader

_log = structlog.get_logger("ftd.seat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """How whoever sits there shows itself to the others, and to whom it listens."""

    topic: str
    payload: bytes
    incarnation: int
    subscriptions: Sequence[str]
    unacknowledged: Sequence[str]


class Chair:
    """See the module."""

    def __init__(
        self,
        broker: BrokerAddress,
        topics: Topics,
        presence: Presence,
        *,
        on_read: Callable[["Chair"], None],
        on_message: Callable[[str, bytes, bool], None],
        on_acknowledged: Callable[[float], None],
        on_over: Callable[["Chair"], None],
    ) -> None:
        """:param on_read: all that was retained has been. :param on_message: once it reigns.
        :param on_over: the session is, and nobody left it."""
        self.found: Leader | None = None
        self.copy: JournalCopy | None = None
        self.reigns = False
        """The journal and the record are on their way: from here on everything else may follow."""
        self._read = False
        self._left = False
        self._early: list[tuple[str, bytes, bool]] = []
        self._topics, self._presence = topics, presence
        self._on_read, self._on_message, self._on_over = on_read, on_message, on_over
        gone = encode_unreachable(
            "the coordinator vanished", incarnation=presence.incarnation, graceful=False
        )
        self.session = MqttSession(
            broker,
            client_id=leader_client_id(topics.cluster, broker),
            subscriptions=(*presence.subscriptions, topics.leader, topics.journal, presence.topic),
            unacknowledged=presence.unacknowledged,
            will=Will(topic=topics.cluster_state, payload=gone),
            on_message=self._heard,
            on_connected=lambda: self.session.publish(presence.topic, presence.payload, retain=True),
            on_acknowledged=on_acknowledged,
        )
        self._task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        await self.session.run_once()
        if not self._left:
            self._on_over(self)

    def leave(self) -> "asyncio.Task[None]":
        """Without waiting: whoever has the seat after us ends the session anyway."""
        self._left = True
        self._task.cancel()
        return self._task

    def hear_early(self) -> None:
        """What came before the reign began."""
        early, self._early = self._early, []
        for message in early:
            self._on_message(*message)

    def _heard(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._left:
            return
        if topic == self._presence.topic:
            if not retained and not self._read:
                self._read = True
                self._on_read(self)
        elif topic in (self._topics.leader, self._topics.journal):  # By the last leader, at the broker.
            if payload and not self._read:
                self._take(topic, payload)
        elif self.reigns:
            self._on_message(topic, payload, retained)
        else:
            self._early.append((topic, payload, retained))

    def _take(self, topic: str, payload: bytes) -> None:
        try:
            if topic == self._topics.leader:
                self.found = decode_leader(payload)
            else:
                copy = decode_copy(payload)
                unpack(copy.state)
                self.copy = copy
        except WireError as error:
            _log.error("refused", topic=topic, problem=str(error), remedy="going on without it")


def leader_client_id(cluster: str, broker: BrokerAddress) -> str:
    """The one that the leader has at the broker. With a password, nobody else can guess it: a client that
    connects with it ends the leader's session."""
    if not broker.password:
        return f"ftd-{cluster}-coordinator"
    known = hashlib.sha256(f"{cluster}\n{broker.username}\n{broker.password}".encode()).hexdigest()
    return f"ftd-{cluster}-coordinator-{known[:16]}"
