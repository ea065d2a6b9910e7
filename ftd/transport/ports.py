"""The connection to the broker as the daemons see it, as small protocols.

``ftd.transport.mqtt`` implements them; the simulator (``ftd.faults.sim``) has sessions in memory.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ftd.transport.mqtt.session import PendingMessage, Will


class BrokerSession(Protocol):
    """A connection to the broker under one client id, as ``ftd.transport.mqtt.session.MqttSession`` describes it."""

    @property
    def connected(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    async def run(self) -> None: ...

    async def run_once(self) -> None: ...

    def refuses(self, size: int) -> bool: ...

    def take_pending(self) -> list[PendingMessage]: ...

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        qos: int = 1,
        queue_offline: bool = False,
        on_done: Callable[[], None] = ...,
    ) -> None: ...

    async def flush(self, timeout_s: float = ...) -> None: ...

    def interrupt(self, for_s: float = ...) -> None: ...


class OpenSession(Protocol):
    """Function that returns a new session, with the parameters of ``MqttSession``."""

    def __call__(
        self,
        *,
        client_id: str,
        subscriptions: Sequence[str] = (),
        unacknowledged: Sequence[str] = (),
        will: Will | None = None,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None] = ...,
        on_lost: Callable[[], None] = ...,
        on_acknowledged: Callable[[float], None] = ...,
    ) -> BrokerSession: ...
