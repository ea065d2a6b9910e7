"""The daemon ``ftd node --snapshots-only``: the snapshot agent of a host, without broker and coordinator.

Scripts of this user reach it through a unix socket. Other agents reach it at the snapshot port, with the
token derived from their common secret (``runtime.wire.snapshot_agent_protocol``).
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import structlog
from aiohttp import web

from ftd import systemd
from ftd.config.daemon import DaemonConfig
from ftd.errors import ConfigurationError, PeerError
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.protocol import bearer_token
from ftd.snapshots.shards.server import ShardServer
from ftd.snapshots.snapshot_agent.agent import ARENA_NAMES, ProtectionPhase, SnapshotAgent
from ftd.snapshots.snapshot_agent.client import PeerAgentClient
from ftd.snapshots.snapshot_agent.fetcher import SnapshotFetcher
from ftd.transport.http_server import listen
from runtime.wire.snapshot_agent_protocol import (
    DIRECTORY_SUFFIX,
    SOCKET,
    FetchRequest,
    ProtectedRun,
    ProtectRequest,
    SnapshotAgentInfo,
)

log = structlog.get_logger("ftd.node")

T = TypeVar("T")

MAX_SOCKET_PATH_BYTES = 107


class SnapshotAgentDaemon:
    """The daemon; ``await SnapshotAgentDaemon(config).run()`` serves until SIGTERM or SIGINT."""

    def __init__(self, config: DaemonConfig) -> None:
        """:raises ConfigurationError: the configuration has no shared secret."""
        self._config = config
        self._token = bearer_token(config.require_secret())
        root = config.snapshot_dir.with_name(f"{config.snapshot_dir.name}{DIRECTORY_SUFFIX}")
        self._socket = config.snapshot_dir.parent / SOCKET
        self._arenas = NodeArenas(
            root, devices=1, limit_bytes=config.snapshot_limit_bytes, names=(ARENA_NAMES,)
        )

    async def run(self) -> int:
        """Serve until a signal ends the daemon, and return the exit code.

        :raises ConfigurationError: the directory, the port or the socket cannot be used.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        self._arenas.open()
        if not self._arenas.acquire():
            raise ConfigurationError(
                f"another daemon of this name uses {self._arenas.root}",
                field="node.name",
                remedy="give each daemon of a host a name and a snapshot_dir of its own",
            )
        tls = self._config.snapshot_tls
        server = ShardServer(
            self._arenas,
            self._token,
            host=self._config.listening_host,
            port=self._config.snapshot_port,
            routes=self._routes(),
            tls=tls.server_context() if tls is not None else None,
        )
        context = tls.client_context() if tls is not None else None
        async with PeerAgentClient(self._token, tls=context) as client, contextlib.AsyncExitStack() as stack:
            await listen(server.start(), self._config.snapshot_port, field="node.snapshot_port")
            stack.push_async_callback(server.close)
            self._info = SnapshotAgentInfo(
                node=self._config.node,
                address=f"{self._config.host}:{server.port}",
                directory=str(self._arenas.root),
                peers=self._config.snapshot_peers,
            )
            self._agent = SnapshotAgent(
                self._arenas,
                client,
                address=self._info.address,
                peers=self._config.snapshot_peers,
                rate_bytes_s=self._config.snapshot_rate_bytes_s,
            )
            self._fetcher = SnapshotFetcher(self._arenas, client, address=self._info.address)
            stack.push_async_callback(self._agent.close)
            await self._listen_to_scripts(stack)
            self._agent.resume()
            log.info("snapshot_agent_started", address=self._info.address, socket=str(self._socket))
            if self._config.is_on_loopback:
                log.warning("loopback_address", reason="other hosts cannot reach this one: set node.host")
            systemd.notify("READY=1", f"STATUS=snapshot agent {self._config.node}")
            watchdog = asyncio.ensure_future(systemd.feed_watchdog())
            await ended.wait()
            watchdog.cancel()
            systemd.notify("STOPPING=1")
        self._arenas.close()
        return 0

    async def _listen_to_scripts(self, stack: contextlib.AsyncExitStack) -> None:
        path = self._socket
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                f"{path} is too long for a unix socket",
                field="node.snapshot_dir",
                remedy="choose a shorter one",
            )
        if _answers(path.as_posix()):
            raise ConfigurationError(
                f"another snapshot agent answers at {path}",
                field="node.snapshot_dir",
                remedy="run one agent for each host and user, or choose another snapshot_dir",
            )
        app = web.Application(client_max_size=4 * 1024 * 1024)
        app.router.add_get("/v1/info", self._answer(self._get_info))
        app.router.add_get("/v1/held/{job}", self._answer(self._get_held_by_all))
        app.router.add_post("/v1/protect", self._answer(self._begin))
        app.router.add_post("/v1/fetch", self._answer(self._fetch))
        app.router.add_post("/v1/remove/{job}", self._answer(partial(self._remove, everywhere=True)))
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        before = os.umask(0o177)
        try:
            path.unlink(missing_ok=True)
            await web.UnixSite(runner, str(path)).start()
        except OSError as error:
            raise ConfigurationError(
                f"{path}: {error.strerror}",
                field="node.snapshot_dir",
                remedy="choose one that can be written to",
            ) from None
        finally:
            os.umask(before)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/scripts/held/{job}", self._answer(self._get_held), allow_head=False),
            web.post("/scripts/{phase:pin|copy|release}", self._answer(self._protect)),
            web.post("/scripts/remove/{job}", self._answer(partial(self._remove, everywhere=False))),
        ]

    @staticmethod
    def _answer(
        work: Callable[[web.Request], Awaitable[Any]],
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap ``work`` into a handler that answers its result as JSON, or status 409 with the reason of its
        failure.
        """

        async def answered(request: web.Request) -> web.StreamResponse:
            try:
                result = await work(request)
            except PeerError as error:
                return web.Response(status=409, text=str(error))
            except OSError as error:
                return web.Response(
                    status=409, text=f"the snapshot agent's memory: {error.strerror or error}"
                )
            return web.Response(body=msgspec.json.encode(result), content_type="application/json")

        return answered

    # --- scripts of this host --------------------------------------------------------------------

    async def _get_info(self, request: web.Request) -> Any:
        return self._info

    async def _get_held_by_all(self, request: web.Request) -> Any:
        return await self._agent.held_by_all(request.match_info["job"])

    async def _begin(self, request: web.Request) -> Any:
        self._agent.begin(await _read(request, ProtectedRun))
        return {}

    async def _fetch(self, request: web.Request) -> Any:
        return await self._fetcher.fetch(await _read(request, FetchRequest))

    # --- other agents ---------------------------------------------------------------------------

    async def _get_held(self, request: web.Request) -> Any:
        return self._agent.held(request.match_info["job"])

    async def _protect(self, request: web.Request) -> Any:
        phase = cast(ProtectionPhase, request.match_info["phase"])
        await self._agent.phases[phase](await _read(request, ProtectRequest))
        return {}

    async def _remove(self, request: web.Request, *, everywhere: bool) -> Any:
        await self._agent.remove(request.match_info["job"], everywhere=everywhere)
        return {}


async def _read(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"the snapshot agent received an invalid request: {error}") from None


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(OSError):
            probe.connect(path)
            return True
    return False
