"""Brings alerts to a webhook, one after the other, and loses none without a word.

What cannot be brought (refused; not within ``retry_for_s``; no room in the queue; the end came) goes into the
dead-letter file, a JSON line each: ``{"at", "why", "body"}``.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from ftd.errors import ConfigurationError
from ftd.transport.wire.public import encode_json, timestamp

_log = structlog.get_logger("ftd.observe.bridge")

RETRYABLE = frozenset({408, 425, 429})
"""Beside all from 500 on: the receiver may take it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    url: str
    dead_letters: Path
    token: str | None = None
    """Sent as a bearer token."""
    queue: int = 1000
    timeout_s: float = 10.0
    """Of one attempt."""
    retry_for_s: float = 300.0
    """Of one alert, all its attempts together."""
    first_retry_s: float = 0.5
    last_retry_s: float = 30.0


class DeadLetterFile:
    """The file; opened at once: a place that cannot be written to is known before anything is lost."""

    def __init__(self, path: Path) -> None:
        """:raises ConfigurationError: it cannot be written to."""
        self.count = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written to: {error.strerror}",
                field="--dead-letters",
                remedy="name a file in a directory that this user may write to",
            ) from None

    def bury(self, body: dict[str, Any], why: str) -> None:
        """On the disk when this returns; where that fails, in the log."""
        self.count += 1
        letter = encode_json({"at": timestamp(), "why": why, "body": body}) + b"\n"
        try:
            os.write(self._file, letter)
            os.fsync(self._file)
            _log.error("dead_letter", alert=body["groupKey"], why=why)
        except OSError as error:
            _log.critical("dead_letter_lost", why=why, problem=str(error), letter=letter.decode())

    def close(self) -> None:
        os.close(self._file)


class WebhookSender:
    """See the module. ``offer`` what is to be brought, ``run`` until cancelled, then ``finish``."""

    def __init__(self, options: WebhookOptions, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        """:raises ConfigurationError: the dead-letter file cannot be written to."""
        self.letters = DeadLetterFile(options.dead_letters)
        self.delivered = 0
        self._options = options
        self._sleep = sleep
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(options.queue)
        self._carried: dict[str, Any] | None = None
        """Taken from the queue, neither delivered nor buried."""

    def offer(self, body: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(body)
        except asyncio.QueueFull:
            self.letters.bury(body, f"the queue is full: {self._options.queue} alerts wait for the webhook")

    async def run(self) -> None:
        """Deliver until cancelled."""
        options = self._options
        headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
        timeout = aiohttp.ClientTimeout(total=options.timeout_s)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                self._carried = await self._queue.get()
                await self._bring(session, self._carried)
                self._carried = None
                self._queue.task_done()

    async def finish(self, running: "asyncio.Task[None]", within_s: float) -> None:
        """Go on for so long, then bury what is left: every alert ends at the webhook or in the file."""
        waiting = asyncio.ensure_future(self._queue.join())
        await asyncio.wait([waiting, running], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        left = [] if self._carried is None else [self._carried]
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                left.append(self._queue.get_nowait())
        for body in left:
            self.letters.bury(body, "the bridge was stopped before the webhook took it")
        self.letters.close()

    async def _bring(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.retry_for_s
        retry_s, attempts = self._options.first_retry_s, 0
        while True:
            attempts += 1
            problem, again = await self._attempt(session, body)
            if problem is None:
                self.delivered += 1
                if attempts > 1:
                    _log.info("delivered", alert=body["groupKey"], attempts=attempts)
                return
            wait_s = retry_s * random.uniform(0.5, 1.0)
            if not again or loop.time() + wait_s > deadline:
                self.letters.bury(body, f"{problem}; attempts: {attempts}")
                return
            _log.warning(
                "not_delivered", alert=body["groupKey"], problem=problem, again_in_s=round(wait_s, 2)
            )
            await self._sleep(wait_s)
            retry_s = min(2 * retry_s, self._options.last_retry_s)

    async def _attempt(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[str | None, bool]:
        """What went wrong, if anything, and whether another attempt may help."""
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
