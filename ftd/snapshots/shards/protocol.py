"""What snapshot servers and their clients say to each other: HTTP.

    GET /v1/<job>/<step>             NodeManifest: what the node holds of a snapshot; verified just now
                                     is what its readers can only verify as a whole
    GET /v1/<job>/<step>/<part>      its bytes; ``Range: bytes=a-b``, ``If-Match: "<digest of the part>"``

    PUT  /v1/<job>/<step>/copies/<owner>/<device>          a Manifest: keep a copy of what it names. Received
    PUT  /v1/<job>/<step>/copies/<owner>/<device>/<part>   its bytes, ``Content-Range: bytes a-b/size``,
                                                           from the byte where they stopped. Received
    POST /v1/<job>/<step>/copies/<owner>/<device>          all is there: verify and commit it. 204

Every request carries ``Authorization: Bearer <token>``, derived from the cluster's secret, which itself goes
over no wire. What is read is checked against the digests of its blocks in the manifest: readers ask for whole
ones. A part without them is checked as a whole; of a range of it ``Want-Digest`` asks for the XXH3 digest of
just the bytes of an answer. So what was overwritten in the middle of a stream, or garbled, is noticed.
``If-Match`` ties a request to the snapshot whose manifest was read: a step that was done again is another
one. A copy counts once its digests were found right and its manifest was written; a connection that broke is
made good by offering the manifest again.
"""

import asyncio
import hashlib
import hmac
import time

import msgspec

from storage.manifest import SnapshotManifest

WANT_DIGEST_HEADER = "Want-Digest"
DIGEST_HEADER = "X-Ftd-Digest"
STREAM_BYTES = 1024 * 1024
"""Written to the socket at once."""
RATED_BYTES = 128 * 1024
"""The same where a rate is to be kept."""
STALL_BYTES = 64 * 1024
"""Less than this within the time of a stall is one, too."""


class NodeManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one node holds of a snapshot: a manifest for each device that wrote one."""

    manifests: tuple[SnapshotManifest, ...]
    corrupt: tuple[str, ...] = ()
    """Names of the parts whose bytes are not what was written, among those without digests of blocks."""


class CopyProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of each part of a copy is here: from its beginning."""

    received: dict[str, int]


class StallDetector:
    """Tells a stream that drips from one that flows."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._since = time.monotonic()
        self._bytes = 0

    def note(self, size_bytes: int) -> None:
        """:raises TimeoutError: there was next to nothing for as long as a stall may last."""
        self._bytes += size_bytes
        now = time.monotonic()
        if now - self._since > self._stall_s:
            if self._bytes < STALL_BYTES:
                raise TimeoutError(f"{self._bytes} bytes in {self._stall_s:g} s")
            self._since, self._bytes = now, 0


class AsyncRateLimiter:
    """A token bucket that all streams drink from; ``None`` bytes a second: as much as there is."""

    def __init__(self, bytes_s: float | None) -> None:
        self.bytes_s = bytes_s
        self._spent_until = 0.0
        self.taken_bytes = 0
        """So many went, or may go at once."""

    @property
    def chunk_bytes(self) -> int:
        """To be written at once."""
        return STREAM_BYTES if self.bytes_s is None else RATED_BYTES

    async def take(self, size_bytes: int) -> None:
        """Return when so many bytes may go."""
        self.taken_bytes += size_bytes
        if self.bytes_s is None:
            return
        now = time.monotonic()
        self._spent_until = max(self._spent_until, now) + size_bytes / self.bytes_s
        await asyncio.sleep(self._spent_until - now)


def bearer_token(secret: str) -> str:
    """The same on all nodes of a cluster; says nothing of the secret."""
    return hmac.new(secret.encode(), b"ftd snapshot server 1", hashlib.sha256).hexdigest()
