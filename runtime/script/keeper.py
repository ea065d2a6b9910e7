"""The keeper of this host, as a script sees it: HTTP over a unix socket. Without torch, without asyncio."""

import http.client
import os
import socket
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.script.plain_state import SnapshotError
from runtime.wire.keeper_protocol import SOCKET, Brought, Facts, Held, Run, Wanted

T = TypeVar("T")

SOCKET_VARIABLE = "FTD_KEEPER"
ASK_S = 10.0
"""For what a keeper knows, or may have to ask its peers."""
BRING_S = 1800.0
"""For many gigabytes over a slow network."""


class KeeperError(SnapshotError):
    """It is not there, or could not do what it was asked."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Keeper:
    """:param path: of its socket; ``$FTD_KEEPER``, else where a keeper of this user has it by default."""

    def __init__(self, path: str | Path | None, default: Path) -> None:
        self.path = Path(path or os.environ.get(SOCKET_VARIABLE) or default / SOCKET)

    def facts(self) -> Facts:
        return self._ask("GET", "/v1/facts", None, Facts)

    def held(self, job: str) -> tuple[Held, ...]:
        return self._ask("GET", f"/v1/held/{job}", None, tuple[Held, ...])

    def begin(self, run: Run) -> None:
        self._ask("POST", "/v1/begin", run, dict[str, str])

    def bring(self, wanted: Wanted) -> Brought:
        return self._ask("POST", "/v1/bring", wanted, Brought, timeout_s=BRING_S)

    def remove(self, job: str) -> None:
        self._ask("POST", f"/v1/remove/{job}", None, dict[str, str])

    def _ask(self, method: str, path: str, body: Any, kind: type[T], *, timeout_s: float = ASK_S) -> T:
        """:raises KeeperError: it is not there, or could not do it."""
        connection = _UnixConnection(self.path, timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body))
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise KeeperError(f"no keeper answers at {self.path}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise KeeperError(data.decode(errors="replace")[:500] or f"the keeper answered {response.status}")
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise KeeperError(f"the keeper at {self.path} is of another version: {error}") from None
