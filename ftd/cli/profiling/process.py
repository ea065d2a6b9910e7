"""Starts a measuring process, reads its answers line by line, and always ends it.

This process never loads torch, so ``python -m runtime.…`` does all measuring and answers in the format of
``runtime.wire.measurement``.
"""

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ftd.errors import ConfigurationError, InternalError
from runtime.wire.measurement import INVALID_EXIT, LayerMeasurements, LinkMeasurements, MeasurementProgress

ProgressCallback = Callable[[int, int], None]
"""Callback that takes the number of completed measurements and of all measurements."""
Answer = TypeVar("Answer", LayerMeasurements, LinkMeasurements)

_MAX_LINE_BYTES = 64 * 1024 * 1024
_HELD_LINES = 200
"""Lines of stderr to hold: enough for a traceback, whatever the user's code prints before."""


async def run_measurement(
    module: str,
    *arguments: str,
    order: bytes,
    answer: type[Answer],
    on_progress: ProgressCallback,
    timeout_s: float | None = None,
) -> Answer:
    """Run ``python -m module`` with an order on its standard input, and return its answer.

    The process has as many threads as a trainer, unless the environment says otherwise.

    :param timeout_s: limit for the whole process; ``None`` if its duration depends on the user's code.
    :raises ConfigurationError: the user has to change something.
    :raises InternalError: the process failed, or took too long.
    """
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    process = await asyncio.create_subprocess_exec(
        # -P: a planner.py in the current directory must not be imported instead of ours.
        *(sys.executable, "-P", "-m", module, "--parent", str(os.getpid()), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**threads, **os.environ},
        limit=_MAX_LINE_BYTES,
    )
    stderr_lines: deque[str] = deque(maxlen=_HELD_LINES)
    try:
        async with asyncio.timeout(timeout_s):
            found, _, _ = await asyncio.gather(
                _read_answer(process, answer, on_progress),
                _read_stderr(process, stderr_lines),
                _send_order(process, order),
            )
            code = await process.wait()
    except TimeoutError:
        raise InternalError(
            f"{module} did not answer within {timeout_s:g} s:\n" + "\n".join(stderr_lines)
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == INVALID_EXIT:
        raise ConfigurationError(stderr_lines[-1] if stderr_lines else "measuring failed", field="training")
    if code != 0 or found is None:
        raise InternalError(f"measuring failed ({module}, exit code {code}):\n" + "\n".join(stderr_lines))
    return found


async def _send_order(process: asyncio.subprocess.Process, order: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # It has ended; its exit code says why.
        process.stdin.write(order)
        await process.stdin.drain()
    process.stdin.close()


async def _read_answer(
    process: asyncio.subprocess.Process, answer: type[Answer], on_progress: ProgressCallback
) -> Answer | None:
    assert process.stdout is not None
    decoder = msgspec.json.Decoder(MeasurementProgress | answer)
    async for line in process.stdout:
        message: MeasurementProgress | Answer = decoder.decode(line)
        if isinstance(message, MeasurementProgress):
            on_progress(message.done, message.total)
        else:
            return message
    return None


async def _read_stderr(process: asyncio.subprocess.Process, lines: deque[str]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        if text:
            lines.append(text)
