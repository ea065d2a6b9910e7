"""Readiness and watchdog messages for ``Type=notify`` services (sd_notify(3)); without systemd they do nothing."""

import asyncio
import contextlib
import os
import socket


def notify(*assignments: str) -> None:
    """Send ``READY=1``, ``STATUS=…``, ``STOPPING=1`` or ``WATCHDOG=1`` if a service manager listens.

    It never raises: a service must not fail because its manager does not listen.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":
        return
    if address[0] == "@":
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sender:
        sender.connect(address)
        sender.send("\n".join(assignments).encode())


def watchdog_period_s() -> float | None:
    """Return the period of ``WATCHDOG=1`` messages: half of systemd's limit, or None without a watchdog."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    watched = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not limit_us.isdigit() or int(limit_us) == 0 or watched != str(os.getpid()):
        return None
    return int(limit_us) / 1e6 / 2


async def feed_watchdog() -> None:
    """Send watchdog messages from the daemon's event loop, so that systemd restarts a daemon whose loop hangs."""
    period_s = watchdog_period_s()
    while period_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(period_s)
