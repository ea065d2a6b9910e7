"""The rendezvous server, through which the trainers of a generation find each other: a small key–value store
over TCP.

Process groups are formed by exchanging addresses under agreed keys. The server lives in the daemon of rank
0's node, so it needs no process of its own, and it holds nothing that matters once a group is formed. A
generation's keys are dropped when its last connection closes or when a newer generation appears. A client
that asks for an older generation is rejected, which keeps stale trainers out of new groups.

The frames are those of ``runtime.wire.store_protocol``. All input is untrusted. Before a client's proof has
been compared (in constant time), the server reads nothing but a small ``StoreHello``, within one time limit
for the whole frame. The number of clients that have not sent their proof is bounded, and the oldest of them
is dropped for a new one. Frames, keys and stored bytes are bounded as well.
"""

import asyncio
import contextlib
import hmac
import math
from dataclasses import dataclass, field

import structlog

from ftd.tasks import cancel_all
from ftd.transport.rate_limited_log import RateLimitedLog
from runtime.wire.frames import Decoder, ProtocolError, encode, read_frame
from runtime.wire.store_protocol import (
    MAX_HELLO_BYTES,
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

log = structlog.get_logger()

MAX_KEYS = 65_536
"""Largest number of keys of one generation. Process groups need about one key for each rank and group."""
MAX_STORED_BYTES = 64 * 1024 * 1024
MAX_CONNECTIONS = 4096
MAX_UNAUTHENTICATED = 256
"""Largest number of connections that have not proved yet that they belong to the cluster."""
HELLO_TIMEOUT_S = 10.0
MAX_GET_TIMEOUT_S = 600.0


class RendezvousRejected(Exception):
    """The server does not serve a request; the text is sent to the client."""


class _Unauthenticated(RendezvousRejected):
    """The client did not prove that it is a trainer of this cluster."""


@dataclass(slots=True)
class _Generation:
    """The key space of one generation."""

    number: int
    values: dict[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    connections: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: bool = False

    def put(self, key: str, value: bytes) -> None:
        if key not in self.values and len(self.values) >= MAX_KEYS:
            raise RendezvousRejected(f"generation {self.number} has {MAX_KEYS} keys; no more are allowed")
        grown = self.size_bytes - len(self.values.get(key, b"")) + len(value)
        if grown > MAX_STORED_BYTES:
            raise RendezvousRejected(
                f"generation {self.number} would hold {grown} bytes; {MAX_STORED_BYTES} are allowed"
            )
        self.size_bytes = grown
        self.values[key] = value
        self.wake()

    def drop(self, key: str) -> bool:
        value = self.values.pop(key, None)
        self.size_bytes -= len(value or b"")
        return value is not None

    def wake(self) -> None:
        """Wake everybody who waits for a change; later waiters get a new event."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def get(self, keys: tuple[str, ...], timeout_s: float) -> tuple[bytes, ...]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, MAX_GET_TIMEOUT_S)):
                while not self.superseded and not all(key in self.values for key in keys):
                    await self.changed.wait()
        if self.superseded:
            raise RendezvousRejected(f"generation {self.number} is superseded")
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise RendezvousRejected(
                f"no {missing[0]!r} within {timeout_s:g} s ({len(missing)} of {len(keys)} missing)"
            )
        return tuple(self.values[key] for key in keys)


class RendezvousServer:
    """The server; use it as ``async with RendezvousServer(secret, host=…) as server`` and read
    ``server.port``.
    """

    def __init__(self, secret: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """:param port: port to listen on from ``start``; 0 takes a free one."""
        self._secret = secret
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._generations: dict[int, _Generation] = {}
        self._newest = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._rejections = RateLimitedLog(log, "rendezvous_rejected")

    @property
    def rejected(self) -> int:
        """Number of connections without a valid proof or with malformed frames."""
        return self._rejections.count

    @property
    def port(self) -> int:
        return self._port

    @property
    def generations(self) -> tuple[int, ...]:
        """Generations that hold keys or connections now: at most one once older trainers have ended."""
        return tuple(self._generations)

    async def start(self) -> None:
        """:raises OSError: the address cannot be bound."""
        self._server = await asyncio.start_server(self._serve, self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await cancel_all(self._connections)
        if self._server is not None:
            await self._server.wait_closed()

    async def __aenter__(self) -> "RendezvousServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            next(iter(self._unauthenticated.values())).transport.abort()
        self._connections.add(task)
        self._unauthenticated[task] = writer
        try:
            await self._serve_requests(reader, writer, task)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            pass  # The trainer disconnected or sent nothing, or this daemon stops: all of them are normal.
        except (ProtocolError, RendezvousRejected) as error:
            peer = writer.get_extra_info("peername")
            if isinstance(error, _Unauthenticated | ProtocolError):
                self._rejections.warn(reason=str(error), peer=peer)
            else:
                log.info("generation_superseded", reason=str(error), peer=peer)
            with contextlib.suppress(ConnectionError):
                writer.write(encode(StoreRejected(reason=str(error))))
        finally:
            self._connections.discard(task)
            self._unauthenticated.pop(task, None)
            writer.close()

    async def _serve_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        """Serve one connection: a StoreHello, then requests, each answered before the next is decoded."""
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            generation = self._enter(await read_frame(reader, StoreRequest, MAX_HELLO_BYTES))
        try:
            self._unauthenticated.pop(task, None)
            writer.write(encode(StoreValues(values=())))
            decoder: Decoder[StoreRequest] = Decoder(StoreRequest, MAX_STORE_FRAME_BYTES)
            while data := await reader.read(65536):
                for request in decoder.feed(data):
                    writer.write(encode(await self._answer(generation, request)))
                    await writer.drain()
        finally:
            self._leave(generation)

    def _enter(self, request: StoreRequest) -> _Generation:
        """Check the first frame and return the generation that the client joins.

        :raises RendezvousRejected: the frame is no hello, its proof is wrong, or its generation is over.
        """
        if not isinstance(request, StoreHello):
            raise _Unauthenticated("the first frame must be StoreHello")
        proof = make_proof(self._secret, request.generation)
        if not hmac.compare_digest(request.proof.encode(), proof.encode()):
            raise _Unauthenticated(
                "wrong secret, or the proof of another generation: check that all nodes have the same secret"
            )
        if request.generation < self._newest:
            raise RendezvousRejected(f"generation {request.generation} is over; {self._newest} is forming")
        self._newest = request.generation
        for old in [number for number in self._generations if number < self._newest]:
            stale = self._generations.pop(old)
            stale.superseded = True
            stale.wake()
        generation = self._generations.setdefault(self._newest, _Generation(self._newest))
        generation.connections += 1
        return generation

    def _leave(self, generation: _Generation) -> None:
        generation.connections -= 1
        if generation.connections == 0 and self._generations.get(generation.number) is generation:
            del self._generations[generation.number]

    async def _answer(self, generation: _Generation, request: StoreRequest) -> StoreReply:
        """Serve one request.

        :raises RendezvousRejected: the generation is over or a limit is exceeded, so the connection ends.
        """
        if generation.superseded:
            raise RendezvousRejected(f"generation {generation.number} is superseded")
        match request:
            case StoreHello():
                raise RendezvousRejected("a second StoreHello on one connection")
            case StoreSet(key=key, value=value):
                generation.put(key, value)
                return StoreValues(values=())
            case StoreAdd(key=key, amount=amount):
                try:
                    total = int(generation.values.get(key, b"0")) + amount
                except ValueError:
                    raise RendezvousRejected(f"{key!r} holds no number") from None
                generation.put(key, b"%d" % total)
                return StoreValues(values=(b"%d" % total,))
            case StoreGet(keys=keys, timeout_s=timeout_s):
                if not math.isfinite(timeout_s):
                    raise RendezvousRejected(f"timeout_s is {timeout_s}")
                try:
                    return StoreValues(values=await generation.get(keys, timeout_s))
                except RendezvousRejected as rejection:
                    return StoreRejected(reason=str(rejection))
            case StoreCheck(keys=keys):
                return StoreValues(values=(b"1" if all(k in generation.values for k in keys) else b"0",))
            case StoreDelete(key=key):
                return StoreValues(values=(b"1" if generation.drop(key) else b"0",))
