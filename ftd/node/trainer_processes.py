"""The trainer processes of a node: a zygote forks them, and a unix socket connects them.

Each trainer opens two connections. On the first one it exchanges frames with the daemon, the second one is
the stream of its output.
"""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from ftd.node.ports import TrainerObserver, TrainerProcess
from ftd.node.zygote import Zygote
from ftd.processes import die_with_parent, signal_group
from ftd.tasks import cancel_all
from runtime.wire import zygote_protocol
from runtime.wire.frames import Decoder, ProtocolError, encode, read_frame
from statemachine.messages import trainer as protocol
from statemachine.messages.values import PlantedFault

log = structlog.get_logger()

_LONGEST_LINE_BYTES = 8192
_MAX_GREETING_BYTES = 4096
_PEER_CREDENTIALS = struct.Struct("3i")


class LocalProcesses:
    """The processes of this host (``ftd.node.ports.HostProcesses``)."""

    def __init__(self) -> None:
        self._unreaped: set[int] = set()
        """Process groups in which this daemon may have children."""

    @property
    def own_pid(self) -> int:
        return os.getpid()

    def signal_group(self, pid: int, number: int) -> None:
        signal_group(pid, number)

    def signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def continue_later(self, pids: Sequence[int], for_s: float) -> None:
        """Let a separate shell continue them, since this daemon may be stopped itself."""
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {for_s:g}; kill -CONT {' '.join(map(str, pids))}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509  # this daemon has one thread
        )

    def reap(self, groups: set[int]) -> None:
        self._unreaped |= groups
        for group in tuple(self._unreaped):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:  # None is left.
                self._unreaped.discard(group)


class _StreamConnection:
    """The connection to one trainer (``ftd.node.ports.TrainerConnection``)."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, frame: protocol.Instruction) -> bool:
        if self._writer.is_closing():
            return False
        self._writer.write(encode(frame))
        return True


class ZygoteTrainers:
    """The trainers that a zygote forks (``ftd.node.ports.TrainerProcesses``).

    :param directory: directory private to this user, for the socket that the trainers connect to.
    :param environment: returns the variables to add to the environment of a device's trainer and of its test.
    :param preload: modules that the zygote imports before it forks.
    """

    def __init__(
        self, *, directory: Path, environment: Callable[[int], dict[str, str]], preload: Sequence[str] = ()
    ) -> None:
        self.socket_path = directory / "trainers.sock"
        """Socket that trainers connect to."""
        self._environment = environment
        self._zygote = Zygote(preload)
        self._connections: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    @property
    def zygote_pid(self) -> int | None:
        return self._zygote.pid

    async def start(self, observer: TrainerObserver) -> None:
        """Listen for trainers and start the zygote; return before torch is imported."""
        self._observer = observer
        self.socket_path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, path=str(self.socket_path))
        self.socket_path.chmod(0o600)
        self._zygote.start(observer.on_notice, observer.on_zygote_end)

    async def close(self) -> None:
        """End the zygote, and with it all trainers, and stop listening."""
        await self._zygote.close()
        if self._server is not None:
            self._server.close()
        await cancel_all(self._connections)
        self.socket_path.unlink(missing_ok=True)

    async def wait_until_warm(self) -> None:
        await self._zygote.wait_until_warm()

    def fork(self, device: int) -> None:
        self._zygote.spawn(
            zygote_protocol.Spawn(
                device=device, socket_path=str(self.socket_path), environment=self._environment(device)
            )
        )

    def test_device(self, number: int, device: int, planted: PlantedFault) -> None:
        self._zygote.spawn(
            zygote_protocol.CheckDevice(
                number=number, device=device, environment=self._environment(device), planted=planted
            )
        )

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: a trainer's frames, or the stream of its output."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            greeting = await self._greeting(reader, writer)
            trainer = await self._observer.identify(greeting)
            match greeting:
                case protocol.Attached():
                    await self._listen(trainer, reader, writer)
                case protocol.Output():
                    await self._collect(trainer, reader)
        except (ProtocolError, asyncio.IncompleteReadError, OSError) as error:
            log.warning("trainer_connection_rejected", reason=str(error))
        except asyncio.CancelledError:
            pass  # This daemon ends. asyncio's streams would log a handler that ends as cancelled.
        finally:
            self._connections.discard(task)
            writer.close()

    async def _greeting(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> protocol.FirstFrame:
        greeting: protocol.FirstFrame = await read_frame(reader, protocol.FirstFrame, _MAX_GREETING_BYTES)
        pid = _peer_pid(writer)
        if pid != greeting.pid:
            raise ProtocolError(f"process {pid} claims to be {greeting.pid}")
        return greeting

    async def _listen(
        self, trainer: TrainerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        decoder: Decoder[protocol.Report] = Decoder(protocol.Report)
        self._observer.on_attached(trainer, _StreamConnection(writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                try:
                    frames = decoder.feed(data)
                except ProtocolError as error:
                    self._observer.fail(trainer, "exited", f"its frames are malformed: {error}")
                    return
                for frame in frames:
                    self._observer.on_report(trainer, frame)
        await self._observer.on_closed(trainer)

    async def _collect(self, trainer: TrainerProcess, reader: asyncio.StreamReader) -> None:
        """Pass the trainer's output on, and log whole lines."""
        line = bytearray()
        try:
            while data := await reader.read(1 << 14):
                self._observer.on_output(trainer, data)
                *whole, rest = (bytes(line) + data).split(b"\n")
                line = bytearray(rest[-_LONGEST_LINE_BYTES:])
                for text in whole:
                    log.info("trainer_output", device=trainer.device, line=text.decode(errors="replace"))
        finally:
            trainer.output_ended.set()


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    """Return the process id of the other end of this unix socket, as the kernel reports it."""
    peer: socket.socket = writer.get_extra_info("socket")
    pid, uid, _ = _PEER_CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    )
    if uid != os.getuid():
        raise ProtocolError(f"process {pid} belongs to another user")
    return int(pid)
