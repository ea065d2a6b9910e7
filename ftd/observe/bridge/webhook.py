"""Sends alerts to a webhook, one after another, and loses none silently.

An alert goes into the dead-letter file, one JSON line ``{"at", "reason", "body"}`` each, if the webhook
rejects it, does not take it within ``retry_for_s``, the queue is full, or the bridge ends first.
"""

import asyncio
import contextlib
import errno
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from ftd.errors import ConfigurationError
from ftd.transport.wire.public import encode_json, timestamp

_log = structlog.get_logger("ftd.observe.bridge")

RETRYABLE = frozenset({408, 425, 429})
"""Statuses below 500 after which the receiver may take the alert later, as it may after any status from 500
on.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    url: str
    dead_letters: Path
    token: str | None = None
    """Bearer token for each request."""
    queue: int = 1000
    timeout_s: float = 10.0
    """Timeout of one attempt."""
    retry_for_s: float = 300.0
    """Timeout of one alert, with all its attempts."""
    first_retry_s: float = 0.5
    last_retry_s: float = 30.0


class DeadLetterFile:
    """The dead-letter file. It is opened at once, so that an unwritable path is found before anything is lost."""

    def __init__(self, path: Path) -> None:
        """:raises ConfigurationError: the file cannot be written."""
        self.count = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written to: {error.strerror}",
                field="--dead-letters",
                remedy="name a file in a directory that this user may write to",
            ) from None

    def append(self, body: dict[str, Any], reason: str) -> None:
        """Append an alert and sync it to disk; if that fails, log the whole alert."""
        self.count += 1
        line = encode_json({"at": timestamp(), "reason": reason, "body": body}) + b"\n"
        try:
            if (written := os.write(self._file, line)) < len(line):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
            _log.error("dead_letter", alert=body["groupKey"], reason=reason)
        except OSError as error:
            _log.critical("dead_letter_lost", reason=reason, problem=str(error), line=line.decode())

    def close(self) -> None:
        os.close(self._file)


class WebhookSender:
    """Queue and sender of alerts: call ``enqueue`` for each, ``run`` until it is cancelled, then ``finish``."""

    def __init__(self, options: WebhookOptions) -> None:
        """:raises ConfigurationError: the dead-letter file cannot be written."""
        self.dead_letter_file = DeadLetterFile(options.dead_letters)
        self.delivered = 0
        self._options = options
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(options.queue)
        self._current: dict[str, Any] | None = None
        """The alert that was taken from the queue and is neither delivered nor in the dead-letter file."""

    def enqueue(self, body: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(body)
        except asyncio.QueueFull:
            self.dead_letter_file.append(
                body, f"the queue is full: {self._options.queue} alerts wait for the webhook"
            )

    async def run(self) -> None:
        """Deliver alerts until cancelled."""
        options = self._options
        headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
        timeout = aiohttp.ClientTimeout(total=options.timeout_s)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                self._current = await self._queue.get()
                await self._deliver(session, self._current)
                self._current = None
                self._queue.task_done()

    async def finish(self, running: "asyncio.Task[None]", within_s: float) -> None:
        """Deliver for at most ``within_s`` more, then write all remaining alerts to the dead-letter file."""
        waiting = asyncio.ensure_future(self._queue.join())
        await asyncio.wait([waiting, running], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        remaining = [] if self._current is None else [self._current]
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                remaining.append(self._queue.get_nowait())
        for body in remaining:
            self.dead_letter_file.append(body, "the bridge was stopped before the webhook took it")
        self.dead_letter_file.close()

    async def _deliver(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.retry_for_s
        retry_s, attempts = self._options.first_retry_s, 0
        while True:
            attempts += 1
            problem, retryable = await self._attempt(session, body)
            if problem is None:
                self.delivered += 1
                if attempts > 1:
                    _log.info("delivered", alert=body["groupKey"], attempts=attempts)
                return
            wait_s = retry_s * random.uniform(0.5, 1.0)
            if not retryable or loop.time() + wait_s > deadline:
                self.dead_letter_file.append(body, f"{problem}; attempts: {attempts}")
                return
            _log.warning(
                "not_delivered", alert=body["groupKey"], problem=problem, retry_in_s=round(wait_s, 2)
            )
            await asyncio.sleep(wait_s)
            retry_s = min(2 * retry_s, self._options.last_retry_s)

    async def _attempt(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[str | None, bool]:
        """Return what went wrong, or ``None``, and whether another attempt may help."""
        kind = {"Content-Type": "application/json"}
        try:
            async with session.post(
                self._options.url, data=encode_json(body), headers=kind, allow_redirects=False
            ) as response:
                status = response.status
        except TimeoutError:
            return f"no answer within {self._options.timeout_s:g} s", True
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}", True
        if 200 <= status < 300:
            return None, False
        return f"the webhook answered {status}", status >= 500 or status in RETRYABLE
