"""The coordinator's end of ``plan_worker``: starts the process, reads its frames, and leaves none behind."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence

import msgspec

from ftd.coordinator.plan_worker import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    PrecomputeAnswer,
    PrecomputeFinished,
    PrecomputeRejected,
    PrecomputeRequest,
)
from ftd.errors import PeerError
from ftd.processes import module_command

COMMAND = module_command("ftd.coordinator.plan_worker")
_LAST_WORDS_BYTES = 2000


class PlanProcess:
    """One build in a process of its own: ``async for answer in PlanProcess(command).run(work)``."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """While it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    async def start(self) -> asyncio.subprocess.Process:
        """Start it in advance, so that it has imported the planner when there is work.

        :raises PeerError: it could not be started.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise PeerError(f"the planning process cannot be started: {error}") from None
        return self._process

    async def dismiss(self) -> None:
        """End a process that was started in advance and got no work."""
        if self._process is not None:
            await _end(self._process, None)

    async def run(self, work: PrecomputeRequest) -> AsyncGenerator[PrecomputeAnswer, None]:
        """Its answers; the last is ``PrecomputeFinished`` or ``PrecomputeRejected``. Left early, by a
        cancellation or otherwise, the
        process is killed.

        :raises PeerError: it could not be started, ended before its last answer, or said something else.
        """
        process = self._process or await self.start()
        assert process.stdin and process.stdout and process.stderr, "all three were asked for"
        said = asyncio.ensure_future(_last_words(process.stderr))
        try:
            payload = msgspec.msgpack.encode(work)
            process.stdin.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
            with contextlib.suppress(ConnectionError):  # What it died of is told below.
                await process.stdin.drain()
            while True:
                answer = await _read(process.stdout)
                if answer is None:
                    code = await process.wait()
                    raise PeerError(f"the planning process ended with {code}: {await said}")
                yield answer
                if isinstance(answer, PrecomputeFinished | PrecomputeRejected):
                    return
        finally:
            ending = asyncio.ensure_future(_end(process, said))
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                await ending  # It takes no time, and half of it would leave pipes behind.
                raise


async def _end(process: asyncio.subprocess.Process, said: asyncio.Future[str] | None) -> None:
    """Kill it if it still runs, and let go of its pipes: they are closed when they are read to the end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.stdin is not None:
        process.stdin.close()
    if said is not None:
        said.cancel()
        await asyncio.gather(said, return_exceptions=True)
    await process.communicate()


async def _read(stream: asyncio.StreamReader) -> PrecomputeAnswer | None:
    """One frame; ``None`` at the end.

    :raises PeerError: it is none of ours.
    """
    try:
        length = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "big")
        if length > MAX_FRAME_BYTES:
            raise PeerError(f"the planning process announced {length} bytes, more than {MAX_FRAME_BYTES}")
        return _DECODER.decode(await stream.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"the planning process said what is no answer: {error}") from None


async def _last_words(stream: asyncio.StreamReader) -> str:
    """The end of what it wrote to stderr."""
    kept = b""
    while chunk := await stream.read(65536):
        kept = (kept + chunk)[-_LAST_WORDS_BYTES:]
    return kept.decode("utf-8", errors="replace").strip() or "it said nothing"


_DECODER: msgspec.msgpack.Decoder[PrecomputeAnswer] = msgspec.msgpack.Decoder(PrecomputeAnswer)
