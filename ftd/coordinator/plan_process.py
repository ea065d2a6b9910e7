"""The coordinator's end of ``plan_worker``: starts the process, reads its frames, and always ends it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence

from ftd.coordinator.plan_worker import (
    MAX_FRAME_BYTES,
    PrecomputeAnswer,
    PrecomputeFinished,
    PrecomputeRejected,
    PrecomputeRequest,
)
from ftd.errors import PeerError
from ftd.processes import module_command
from runtime.wire.frames import ProtocolError, encode, read_frame

COMMAND = module_command("ftd.coordinator.plan_worker")
_STDERR_BYTES = 2000


class PlanProcess:
    """One build in a separate process: ``async for answer in PlanProcess(command).run(work)``."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process in advance, so that it has imported the planner when there is work.

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
        """Yield the answers; the last one is ``PrecomputeFinished`` or ``PrecomputeRejected``. If the
        iteration ends early, for instance by a cancellation, the process is killed.

        :raises PeerError: the process could not be started, ended before its last answer, or wrote
            something else.
        """
        process = self._process or await self.start()
        assert process.stdin and process.stdout and process.stderr, "all three were asked for"
        stderr = asyncio.ensure_future(_read_stderr(process.stderr))
        try:
            process.stdin.write(encode(work))
            with contextlib.suppress(ConnectionError):  # The reason of its end is reported below.
                await process.stdin.drain()
            while True:
                try:
                    answer: PrecomputeAnswer = await read_frame(
                        process.stdout, PrecomputeAnswer, MAX_FRAME_BYTES
                    )
                except ProtocolError as error:
                    raise PeerError(f"the planning process sent an invalid answer: {error}") from None
                except asyncio.IncompleteReadError:
                    code = await process.wait()
                    raise PeerError(f"the planning process ended with {code}: {await stderr}") from None
                yield answer
                if isinstance(answer, PrecomputeFinished | PrecomputeRejected):
                    return
        finally:
            ending = asyncio.ensure_future(_end(process, stderr))
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                await ending  # This takes no time, and an interruption would leave pipes open.
                raise


async def _end(process: asyncio.subprocess.Process, stderr: asyncio.Future[str] | None) -> None:
    """Kill the process if it still runs, and close its pipes, which must be read to the end for that."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.stdin is not None:
        process.stdin.close()
    if stderr is not None:
        stderr.cancel()
        await asyncio.gather(stderr, return_exceptions=True)
    await process.communicate()


async def _read_stderr(stream: asyncio.StreamReader) -> str:
    """Return the end of what the process wrote to stderr."""
    end = b""
    while chunk := await stream.read(65536):
        end = (end + chunk)[-_STDERR_BYTES:]
    return end.decode("utf-8", errors="replace").strip() or "it wrote nothing to stderr"
