"""The TCP connections of gloo: which belong to a communicator, how a broken one is noticed, and how all are closed.

gloo offers no way to interrupt an operation, and its timeout says nothing about the peer: whoever waits for a peer that
computes for long times out, too. So the timeout is very long, the kernel watches whether the connections are alive, and
an abort shuts them down, which ends nearly every operation on them at once.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from torch._C._distributed_c10d import ProcessGroupGloo

CONNECTION_TIMEOUT_S = 60.0
"""Time after which a connection whose other end does not acknowledge anything is broken. The kernel of a host
acknowledges for processes that compute, wait or are stopped."""

SHUT_DOWN_DELAY_S = 1.0
"""Time from an abort until the connections are shut down. Ranks are aborted at about the same time, and one whose order
comes a little later must not take the shutdown for the end of a peer."""

_PROBES = 4
"""Unanswered probes after which an idle connection is broken."""


class Listener:
    """gloo's listening socket and event loop for one address.

    Making one takes 0.3 ms and removing one takes 10 ms with the interpreter lock held, so they are used again by later
    communicators. At most one open communicator uses each.
    """

    def __init__(self, host: str) -> None:
        before = _listening()
        self.host = host
        self.device: object = ProcessGroupGloo.create_device(hostname=host)
        self._ports = _listening() - before

    def accepted(self) -> dict[str, socket.socket]:
        """Return duplicates of the connections that were accepted here and are still open, by their identity."""
        found: dict[str, socket.socket] = {}
        for identity, connection in _sockets():
            with contextlib.suppress(OSError):
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if not listens and connection.getsockname()[1] in self._ports:
                    found[identity] = connection
                    continue
            connection.close()
        return found


class Connections:
    """The connections that one communicator accepts. Each connection of two ranks is accepted by one of them."""

    def __init__(self, host: str) -> None:
        self._listener = _take(host)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._shut = False
        self._pending = 0
        """Shutdowns that are still to come; the connections are kept until then."""
        old = self._listener.accepted()
        self._older = frozenset(old)
        for connection in old.values():
            connection.close()

    @property
    def device(self) -> object:
        """gloo's device."""
        return self._listener.device

    def find(self) -> None:
        """Find the connections that were accepted since this object was made, and have the kernel watch them."""
        found = self._listener.accepted()
        with self._lock:
            for identity, connection in found.items():
                if identity in self._older or self._shut:
                    connection.close()
                else:
                    _watch(connection)
                    self._open.append(connection)

    def shut_down_soon(self) -> None:
        """End what waits on these connections, here and at the other ends, after ``SHUT_DOWN_DELAY_S``.

        From any thread, more than once.
        """
        with self._lock:
            self._pending += 1
        timer = threading.Timer(SHUT_DOWN_DELAY_S, self._shut_down)
        timer.daemon = True
        timer.start()

    def _shut_down(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # It was closed by the other end.
                    connection.shutdown(socket.SHUT_RDWR)
            self._pending -= 1
            ends = self._shut and not self._pending
        if ends:
            self._give_up()

    def release(self) -> None:
        """Let a later communicator use the listener; gloo keeps the connections while it needs them."""
        with self._lock:
            ends = not self._shut and not self._pending
            self._shut = True
        if ends:
            self._give_up()

    def _give_up(self) -> None:
        for connection in self._open:
            connection.close()
        self._open = []
        _give_back(self._listener)


def _watch(connection: socket.socket) -> None:
    idle_s = CONNECTION_TIMEOUT_S / 2
    probe_s = idle_s / _PROBES
    with contextlib.suppress(OSError):  # It was closed by the other end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(idle_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(probe_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(CONNECTION_TIMEOUT_S * 1e3))


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield the identity and a duplicate of each internet socket of this process; the caller closes it."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            identity = str(entry.readlink())
            if not identity.startswith("socket:"):
                continue
            duplicate = os.dup(int(entry.name))
        except OSError:  # It was closed meanwhile.
            continue
        connection = socket.socket(fileno=duplicate)
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            yield identity, connection
        else:
            connection.close()


def _listening() -> frozenset[int]:
    """Return the ports that this process listens on."""
    ports: set[int] = set()
    for _, connection in _sockets():
        with connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(connection.getsockname()[1])
    return frozenset(ports)


_MOST_FREE = 2
"""Listeners that are kept; one is in use, and another one still ends what was aborted."""
_free: list[Listener] = []
_lock = threading.Lock()


def _take(host: str) -> Listener:
    with _lock:
        for listener in _free:
            if listener.host == host:
                _free.remove(listener)
                return listener
        return Listener(host)


def _give_back(listener: Listener) -> None:
    with _lock:
        if len(_free) < _MOST_FREE:
            _free.append(listener)
