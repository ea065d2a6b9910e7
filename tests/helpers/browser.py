"""Headless Chromium for tests and benchmarks, controlled through the DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from tests.helpers.waiting import PATIENCE_S

Json = dict[str, Any]

MOST_MESSAGE_BYTES = 64 * 1024 * 1024
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@cache
def find_chromium() -> str | None:
    """Return the path of Chromium if it is installed and starts; a stub that asks for a snap does not."""
    for name in _NAMES:
        if path := shutil.which(name):
            done = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=PATIENCE_S)
            if done.returncode == 0:
                return path
    return None


class Page:
    """One tab."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        """Errors and exceptions that the page logged, and violations of its content security policy."""

    async def call(self, method: str, **params: Any) -> Json:
        return await self._browser.call(method, session=self._session, **params)

    async def open(self, url: str) -> None:
        """Navigate to the page, and return when the document is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'", "a page")

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, what: str, limit_s: float = PATIENCE_S) -> None:
        """Wait until the expression is true; evaluate it in the page every 20 ms."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while True:
            with contextlib.suppress(RuntimeError, AssertionError):  # Evaluation fails during navigation.
                if await self.value(f"Promise.resolve({expression}).then(Boolean)"):
                    return
            if asyncio.get_running_loop().time() > deadline:
                text = await self.value("document.body.innerText.slice(0, 3000)")
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{text}\n{self.problems}")
            await asyncio.sleep(0.02)

    async def look(self, width: int, height: int, *, dark: bool, phone: bool = False) -> None:
        """Set the size of the window and the preferred colours of the system."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def shoot(self, path: Path, *, whole: bool = False) -> None:
        """Save a screenshot as PNG.
        :param whole: include the part of the page below the window.
        """
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def on_event(self, method: str, params: Json) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"])[:1000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class Browser:
    """A connection to a browser that ``chromium()`` started."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._pages: dict[str, Page] = {}
        self._traced: list[Json] | None = None
        self._trace_over = asyncio.Event()

    async def call(self, method: str, *, session: str | None = None, **params: Any) -> Json:
        """Send a command and return its result.
        :raises RuntimeError: the browser reports an error.
        """
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        return await asyncio.wait_for(self._waiting[number], PATIENCE_S)

    async def page(self) -> Page:
        """Open a new tab with its own profile."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        made = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            await page.call(f"{domain}.enable")
        return page

    @contextlib.asynccontextmanager
    async def traced(self) -> AsyncIterator[list[Json]]:
        """Record what all threads do in this context, in Chromium's trace format; the list is filled at the
        end.
        """
        events: list[Json] = []
        self._traced, self._trace_over = events, asyncio.Event()
        categories = "toplevel,devtools.timeline,blink.user_timing,disabled-by-default-devtools.timeline"
        await self.call("Tracing.start", transferMode="ReportEvents", categories=categories)
        yield events
        await self.call("Tracing.end")
        await asyncio.wait_for(self._trace_over.wait(), PATIENCE_S)
        self._traced = None

    async def listen(self) -> None:
        """Dispatch the browser's messages until it closes the connection."""
        async for message in self._socket:
            said = json.loads(message.data)
            waiting = self._waiting.pop(said.get("id", 0), None)
            if waiting is not None and not waiting.done():
                if "error" in said:
                    waiting.set_exception(RuntimeError(said["error"]["message"]))
                else:
                    waiting.set_result(said["result"])
            elif said.get("method") == "Tracing.dataCollected" and self._traced is not None:
                self._traced += said["params"]["value"]
            elif said.get("method") == "Tracing.tracingComplete":
                self._trace_over.set()
            elif (page := self._pages.get(said.get("sessionId", ""))) is not None and "method" in said:
                page.on_event(said["method"], said["params"])


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a browser with an empty profile; at the end, stop it with all its processes."""
    path = find_chromium()
    assert path is not None, "chromium is not installed"
    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            "--headless=new",
            "--remote-debugging-port=0",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--mute-audio",
            f"--user-data-dir={profile}",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = await asyncio.wait_for(_address(process), PATIENCE_S)
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(url, max_msg_size=MOST_MESSAGE_BYTES) as socket,
            ):
                browser = Browser(socket)
                listening = asyncio.ensure_future(browser.listen())
                try:
                    yield browser
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said: list[str] = []
    while line := (await process.stderr.readline()).decode(errors="replace"):
        said.append(line)
        if "DevTools listening on " in line:
            # Drain the rest of its output: a full pipe would stop the browser.
            drain = asyncio.ensure_future(process.stderr.read())
            drain.add_done_callback(lambda done: done.cancelled() or done.exception())
            return line.split("DevTools listening on ", 1)[1].strip()
    raise AssertionError(f"chromium did not start: {''.join(said)[-2000:]}")
