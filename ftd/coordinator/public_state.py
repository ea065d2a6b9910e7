"""The cluster's state as the coordinator publishes it, and a helper that ends tasks."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ftd
from ftd.transport.wire.public import SCHEMA, timestamp


def public_state(
    state: dict[str, Any], coordinator: dict[str, Any], progress: tuple[int, int] | None, now: float
) -> dict[str, Any]:
    """Return the machine's public state with the fields of the coordinator that publishes it, and the progress
    of planning.

    :param now: time on the machine's clock.
    """
    if state["snapshot"] is not None:
        state["snapshot"]["at"] = timestamp(ago_s=max(0.0, now - state["snapshot"]["at"]))
    return {
        **state,
        "planning": progress and {"done": progress[0], "total": progress[1]},
        "schema": SCHEMA,
        "version": ftd.__version__,
        **coordinator,
        "at": timestamp(),
    }


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
