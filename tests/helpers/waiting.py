"""Waiting for what a test needs, without an event that says so."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 200.0
"""The longest wait for what takes a few seconds: the machine may be busy with other work. Tests end after 900 s."""


def until(
    holds: Callable[[], object],
    what: str = "what the test waits for",
    *,
    describe: Callable[[], object] | None = None,
    every_s: float = 0.01,
    limit_s: float = PATIENCE_S,
) -> None:
    """Wait until a condition holds.

    :param what: names the condition in the error.
    :param describe: returns what else the error contains.
    :raises AssertionError: it did not hold within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while not holds():
        _check_time(deadline, limit_s, what, describe)
        time.sleep(every_s)


async def until_async(
    holds: Callable[[], object],
    what: str = "what the test waits for",
    *,
    describe: Callable[[], object] | None = None,
    every_s: float = 0.01,
    limit_s: float = PATIENCE_S,
) -> None:
    """Wait until a condition holds, while other tasks run; as ``until``."""
    deadline = time.monotonic() + limit_s
    while not holds():
        _check_time(deadline, limit_s, what, describe)
        await asyncio.sleep(every_s)


def _check_time(deadline: float, limit_s: float, what: str, describe: Callable[[], object] | None) -> None:
    if time.monotonic() > deadline:
        more = "" if describe is None else f"\n{describe()}"
        raise AssertionError(f"not within {limit_s:g} s: {what}{more}")
