"""Tasks of an event loop that are started, awaited and ended together."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any


def start_task(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Start work as a task that is in ``tasks`` until it ends, and return it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    cancelled = tuple(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


async def gather_all(work: Iterable[Awaitable[None]]) -> None:
    """Wait until all of the work has ended, and then raise the first error: nothing writes any more by then."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the work concurrently; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
