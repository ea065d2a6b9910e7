"""The trainers' side of the rendezvous server: a ``torch.distributed.Store`` over one plain socket.

torch's own TCPStore does blocking reverse DNS look-ups in its only server thread and cannot be interrupted
while it waits. This store can be closed from any thread, which ends every wait at once. It never retries or
reconnects: a store belongs to one attempt to form the groups of one generation.
"""

import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from runtime.wire.frames import Decoder, ProtocolError, encode
from runtime.wire.store_protocol import (
    MAX_STORE_FRAME_BYTES,
    StoreAdd,
    StoreCheck,
    StoreDelete,
    StoreGet,
    StoreHello,
    StoreRejected,
    StoreReply,
    StoreRequest,
    StoreSet,
    StoreValues,
    make_proof,
)

_ANSWER_MARGIN_S = 5.0
"""Time for which a client waits longer than the server before it treats the connection as dead."""


class StoreError(RuntimeError):
    """A rendezvous that was rejected, timed out, or was lost; or a store that was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address and secret of the rendezvous of one generation."""

    host: str
    port: int
    token: str
    """The secret; it does not leave this process."""
    generation: int


class StoreConnection:
    """One authenticated connection; requests from several threads take turns."""

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_s: float) -> None:
        """Connect and authenticate.

        :raises StoreError: the server is unreachable within ``timeout_s``, or rejected the token or the
            generation.
        """
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._decoder: Decoder[StoreReply] = Decoder(StoreReply, 2 * MAX_STORE_FRAME_BYTES)
        try:
            self._socket = socket.create_connection((rendezvous.host, rendezvous.port), timeout_s)
        except OSError as error:
            raise StoreError(f"no rendezvous at {rendezvous.host}:{rendezvous.port}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proof = make_proof(rendezvous.token, rendezvous.generation)
        self.request(StoreHello(proof=proof, generation=rendezvous.generation, rank=rank))

    def request(self, request: StoreRequest) -> tuple[bytes, ...]:
        """Send a request and return the values of the reply.

        :raises StoreError: the request was rejected, timed out, or lost its connection.
        """
        patience_s = request.timeout_s if isinstance(request, StoreGet) else self._timeout_s
        with self._lock:
            try:
                self._socket.settimeout(patience_s + _ANSWER_MARGIN_S)
                self._socket.sendall(encode(request))
                reply = self._read()
            except (OSError, ProtocolError) as error:
                self.close()
                raise StoreError(f"rendezvous connection lost: {error}") from error
        if isinstance(reply, StoreRejected):
            raise StoreError(f"rendezvous rejected: {reply.reason}")
        return reply.values

    def _read(self) -> StoreValues | StoreRejected:
        while True:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError("closed by the other end")
            for reply in self._decoder.feed(data):
                return reply

    def close(self) -> None:
        """Close the connection. Any thread may call this; a thread that waits in ``request`` gets a StoreError
        at once.
        """
        with contextlib.suppress(OSError):  # Already closed by the other end.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class RendezvousStore(Store):
    """The store through which ``ProcessGroupGloo`` and ``ProcessGroupNCCL`` form a group.

    gloo gets each peer's address by ``wait([key])`` and then ``get(key)``. The value that came with the
    wait is kept for the ``get``, which halves the number of round trips.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_s: float) -> None:
        super().__init__()
        self._connection = StoreConnection(rendezvous, rank, timeout_s)
        self._timeout_s = timeout_s
        self._waited: dict[str, bytes] = {}

    def close(self) -> None:
        self._connection.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._connection.request(StoreSet(key=key, value=_as_bytes(value)))

    def get(self, key: str) -> bytes:
        waited = self._waited.pop(key, None)
        if waited is not None:
            return waited
        return self._connection.request(StoreGet(keys=(key,), timeout_s=self._timeout_s))[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        values = self._connection.request(StoreGet(keys=tuple(keys), timeout_s=timeout_s))
        self._waited.update(zip(keys, values, strict=True))

    def check(self, keys: list[str]) -> bool:
        return self._connection.request(StoreCheck(keys=tuple(keys))) == (b"1",)

    def add(self, key: str, value: int) -> int:
        return int(self._connection.request(StoreAdd(key=key, amount=value))[0])

    def delete_key(self, key: str) -> bool:
        return self._connection.request(StoreDelete(key=key)) == (b"1",)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._connection.request(StoreGet(keys=tuple(keys), timeout_s=self._timeout_s)))

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
