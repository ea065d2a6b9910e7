"""The daemon's side of the zygote: start it, ask it to fork, and restart it when it dies.

``runtime.process.zygote`` imports torch once. This module only writes ``ZygoteRequest`` to its stdin and reads
``ZygoteNotice`` from its stdout, so the daemon stays free of torch.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

import structlog

from ftd.processes import module_command
from runtime.streaming_stores import streaming_environment
from runtime.wire import frames, zygote_protocol

log = structlog.get_logger()

_RESTART_DELAYS_S = (0.0, 0.5, 2.0, 10.0)
"""Delay before the n-th restart in a row; the count starts again when a zygote became warm."""
_STDERR_TAIL_BYTES = 4096
_PIPES_S = 1.0
"""Longest time from the end of a zygote to the end of its pipes, which a process that a preloaded module started
may hold open.
"""


class Zygote:
    """The process that keeps one zygote running and forwards its notices in order.

    :param preload: modules besides torch that trainers find loaded.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = preload
        self._process: asyncio.subprocess.Process | None = None
        self._warm = asyncio.Event()
        self._waiting: list[zygote_protocol.ZygoteRequest] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(
        self,
        on_notice: Callable[[zygote_protocol.ZygoteNotice], None],
        on_end: Callable[[int, str], None],
    ) -> None:
        """Start the zygote, and start it again whenever it dies.

        :param on_end: called with its exit status and the tail of its stderr whenever it dies.
        """
        self._on_notice, self._on_end = on_notice, on_end
        self._task = asyncio.get_running_loop().create_task(self._keep_running())

    async def wait_until_warm(self) -> None:
        """Return once torch is imported and forks are quick."""
        await self._warm.wait()

    def spawn(self, request: zygote_protocol.ZygoteRequest) -> None:
        """Fork a trainer or a device test now, or as soon as the zygote is warm."""
        if self._warm.is_set():
            self._write(request)
        else:
            self._waiting.append(request)

    async def close(self) -> None:
        """End the zygote; the kernel kills its trainers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await _end(self._process)

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(_RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)])
            status, stderr_tail = await self._run_once()
            failures = 0 if self._warm.is_set() else failures + 1
            self._warm.clear()
            self._waiting.clear()
            self._on_end(status, stderr_tail)

    async def _run_once(self) -> tuple[int, str]:
        """Run one zygote process until it ends, and return its exit status and the tail of its stderr."""
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command("runtime.process.zygote", "--parent", str(os.getpid()), *self._preload),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **streaming_environment(os.environ)},
            )
        except OSError as error:  # No memory, process or descriptor is left: a retry may succeed.
            return 1, f"it could not be started: {error}"
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        tail = bytearray()
        reading = asyncio.get_running_loop().create_task(self._read_stderr(process.stderr, tail))
        try:
            await self._listen(process.stdout)
            status = await _end(process)
            await asyncio.wait([reading], timeout=_PIPES_S)
            return status, tail.decode(errors="replace").strip()
        finally:
            reading.cancel()

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        decoder: frames.Decoder[zygote_protocol.ZygoteNotice] = frames.Decoder(zygote_protocol.ZygoteNotice)
        while data := await stream.read(1 << 16):
            try:
                notices = decoder.feed(data)
            except frames.ProtocolError as error:
                log.error("zygote_frames_malformed", reason=str(error))
                return
            for notice in notices:
                if isinstance(notice, zygote_protocol.ZygoteReady):
                    self._warm.set()
                    waiting, self._waiting = self._waiting, []
                    for request in waiting:
                        self._write(request)
                self._on_notice(notice)

    async def _read_stderr(self, stream: asyncio.StreamReader, tail: bytearray) -> None:
        """Log the stream, and keep its last bytes in ``tail``."""
        while data := await stream.read(1 << 14):
            tail += data
            del tail[:-_STDERR_TAIL_BYTES]
            log.info("zygote_output", text=data.decode(errors="replace").rstrip())

    def _write(self, request: zygote_protocol.ZygoteRequest) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frames.encode(request))


async def _end(process: asyncio.subprocess.Process) -> int:
    """Kill a process unless it has ended, and return its exit status.

    ``process.kill()`` would take the status of a process that has just ended away from asyncio, which then reports
    exit code 255. ``process.wait()`` may also wait for other processes that have its pipes.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _PIPES_S)
        if process.returncode is not None:
            return process.returncode
