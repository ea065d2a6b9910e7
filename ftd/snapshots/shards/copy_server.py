"""The receiving side of a snapshot server: other nodes' snapshots, for ``ftd.snapshots.shards.copies``.

Requests have passed the server's check of the cluster's token. Bodies go straight into the slot as they are
read. A sender that stalls, or that sends more than it announced, is disconnected.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator

import structlog
from aiohttp import web

from ftd.snapshots.shards.copies import CopyDraft, CopyNoSpaceError, CopyRejectedError, CopyStore, Key
from ftd.snapshots.shards.protocol import CopyProgress, StallDetector
from storage.errors import CorruptDataError
from storage.manifest import SnapshotManifest, SnapshotPart, decode_record, encode_record

log = structlog.get_logger("ftd.node")

MAX_RECEIVED = 8
"""Number of streams at once."""
MAX_OFFER_BYTES = 4 * 1024 * 1024
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_STEP = re.compile(r"\d{1,12}", re.ASCII)
_DEVICE = re.compile(r"\d{1,4}", re.ASCII)
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class CopyServer:
    """The server of the requests for copies.

    :param stall_s: a sender that sends hardly anything for this long is disconnected.
    """

    def __init__(self, copies: CopyStore, *, stall_s: float) -> None:
        self._copies = copies
        self._stall_s = stall_s
        self._streams = asyncio.Semaphore(MAX_RECEIVED)

    def add_to(self, app: web.Application) -> None:
        route = "/v1/{job}/{step}/copies/{owner}/{device}"
        app.router.add_put(route, self._offer)
        app.router.add_post(route, self._commit)
        app.router.add_put(f"{route}/{{part:.+}}", self._part)

    async def _offer(self, request: web.Request) -> web.StreamResponse:
        job, step, key = _parse_copy(request)
        body = bytearray()
        try:
            async with asyncio.timeout(self._stall_s):
                while chunk := await request.content.readany():
                    body += chunk
                    if len(body) > MAX_OFFER_BYTES:
                        raise web.HTTPRequestEntityTooLarge(MAX_OFFER_BYTES, len(body))
            manifest = decode_record(bytes(body), SnapshotManifest, "the offer")
        except (ConnectionError, web.RequestPayloadError, TimeoutError):
            raise web.HTTPRequestTimeout(text="the offer did not arrive") from None
        except CorruptDataError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        if (manifest.job_id, manifest.step) != (job, step):
            raise web.HTTPBadRequest(text="the manifest is of another snapshot")
        with _answered_rejections():
            received = await self._copies.offer(key, manifest)
        return web.Response(body=encode_record(CopyProgress(received=received)))

    async def _part(self, request: web.Request) -> web.StreamResponse:
        job, step, key = _parse_copy(request)
        with _answered_rejections():
            draft = self._copies.draft(key, job, step)
        part = next((p for p in draft.manifest.parts if p.name == request.match_info["part"]), None)
        if part is None:
            raise web.HTTPNotFound(text="no such part was offered")
        first, end = _range_of(request, part)
        if self._streams.locked():
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        if first != draft.received[part.name]:
            raise web.HTTPConflict(text=f"{draft.received[part.name]} bytes of {part.name} have arrived")
        draft.turn += 1
        try:
            async with self._streams:
                await self._receive(request, draft, part, end, draft.turn)
        except (ConnectionError, web.RequestPayloadError):
            raise web.HTTPBadRequest(text="the connection broke") from None  # Nobody reads this answer.
        except TimeoutError:
            log.warning("stalled_sender", peer=request.remote, path=request.path[:200])
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPRequestTimeout(text="the sender stalled") from None
        return web.Response(body=encode_record(CopyProgress(received=dict(draft.received))))

    async def _receive(
        self, request: web.Request, draft: CopyDraft, part: SnapshotPart, end: int, turn: int
    ) -> None:
        """Receive bytes of a part.

        :raises TimeoutError: the sender stalls.
        """
        window, meter = draft.window(part), StallDetector(self._stall_s)
        while True:
            async with asyncio.timeout(self._stall_s):
                chunk = await request.content.readany()
            if draft.turn != turn:
                raise web.HTTPConflict(text="another sender replaced this one")
            here = draft.received[part.name]
            if not chunk:
                if here != end:
                    raise web.HTTPBadRequest(text=f"the body ended at byte {here} instead of {end}")
                return
            if here + len(chunk) > end:
                raise web.HTTPBadRequest(text="more bytes than announced")
            window[here : here + len(chunk)] = chunk
            draft.received[part.name] = here + len(chunk)
            meter.record(len(chunk))

    async def _commit(self, request: web.Request) -> web.StreamResponse:
        job, step, key = _parse_copy(request)
        try:
            with _answered_rejections():
                corrupt = await self._copies.commit(key, job, step)
        except OSError as error:
            raise web.HTTPInsufficientStorage(text=f"its manifest cannot be written: {error}") from None
        if corrupt:
            raise web.HTTPUnprocessableEntity(
                text=f"{', '.join(corrupt[:3])}: the bytes differ from the offer"
            )
        return web.Response(status=204)


def _parse_copy(request: web.Request) -> tuple[str, int, Key]:
    """Return job, step and copy that a request names.

    :raises web.HTTPException: 404: the names are not valid.
    """
    found = request.match_info
    if not (
        _STEP.fullmatch(found["step"])
        and _DEVICE.fullmatch(found["device"])
        and _OWNER.fullmatch(found["owner"])
    ):
        raise web.HTTPNotFound(text="no such copy")
    return found["job"], int(found["step"]), (found["owner"], int(found["device"]))


@contextlib.contextmanager
def _answered_rejections() -> Iterator[None]:
    """Answer why a copy is rejected."""
    try:
        yield
    except CopyRejectedError as error:
        kind = web.HTTPInsufficientStorage if isinstance(error, CopyNoSpaceError) else web.HTTPConflict
        raise kind(text=str(error)) from None


def _range_of(request: web.Request, part: SnapshotPart) -> tuple[int, int]:
    """Return the first byte of the range and the byte after the last.

    :raises web.HTTPException: 411, 400, 416: the length is missing or wrong, or the range is not within the
        part.
    """
    match = _RANGE.fullmatch(request.headers.get("Content-Range", ""))
    first, last, size = (int(match[1]), int(match[2]), int(match[3])) if match else (1, 0, 0)
    if not first <= last < size or size != part.size_bytes:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{part.size_bytes}"})
    if request.content_length is None:
        raise web.HTTPLengthRequired
    if request.content_length != last + 1 - first:
        raise web.HTTPBadRequest(
            text=f"a length of {request.content_length} does not fit bytes {first} to {last}"
        )
    return first, last + 1
