"""The HTTP protocol between snapshot servers and their clients.

    GET /v1/<job>/<step>             NodeManifest: what the node holds of a snapshot; parts that readers can
                                     verify only as a whole were verified just now
    GET /v1/<job>/<step>/<part>      its bytes; ``Range: bytes=a-b``, ``If-Match: "<digest of the part>"``

    PUT  /v1/<job>/<step>/copies/<owner>/<device>          a SnapshotManifest: hold a copy of what it names.
                                                           CopyProgress
    PUT  /v1/<job>/<step>/copies/<owner>/<device>/<part>   its bytes, ``Content-Range: bytes a-b/size``,
                                                           from the byte where they stopped. CopyProgress
    POST /v1/<job>/<step>/copies/<owner>/<device>          all bytes are there: verify and commit. 204

Every request carries ``Authorization: Bearer <token>``. The token is derived from the cluster's secret, which
itself never crosses the network. Bytes are compared with the digests of their blocks in the manifest, so readers
request whole blocks. A part without block digests is verified as a whole; for a range of it ``Want-Digest``
requests the XXH3 digest of exactly the bytes of the answer. So bytes that were overwritten or corrupted during a
stream are noticed. ``If-Match`` ties a request to the snapshot whose manifest was read: a repeated step has
another snapshot. A copy counts once its digests were verified and its manifest was written. After a broken
connection, the sender offers the manifest again.
"""

import asyncio
import hashlib
import hmac
import time

import msgspec

from storage.manifest import SnapshotManifest

LINK_TEST_BYTES = 4 * 1024 * 1024
"""Most bytes of a transfer that tests a link."""
WANT_DIGEST_HEADER = "Want-Digest"
DIGEST_HEADER = "X-Ftd-Digest"
STREAM_BYTES = 1024 * 1024
"""Size of one write to the socket."""
RATED_BYTES = 128 * 1024
"""Size of one write where a rate limit applies."""
STALL_BYTES = 64 * 1024
"""A stream that moves fewer bytes than this within its stall time has stalled."""


class NodeManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of a snapshot that one node holds: a manifest for each device that wrote one."""

    manifests: tuple[SnapshotManifest, ...]
    corrupt: tuple[str, ...] = ()
    """Names of the corrupt parts, among those without digests of their blocks."""


class CopyProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of a copy: the number of bytes of each part that have arrived, from its beginning."""

    received: dict[str, int]


class StallDetector:
    """A detector of streams that move hardly any bytes."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._since = time.monotonic()
        self._bytes = 0

    def record(self, size_bytes: int) -> None:
        """Count moved bytes.

        :raises TimeoutError: hardly anything moved within the stall time.
        """
        self._bytes += size_bytes
        now = time.monotonic()
        if now - self._since > self._stall_s:
            if self._bytes < STALL_BYTES:
                raise TimeoutError(f"{self._bytes} bytes in {self._stall_s:g} s")
            self._since, self._bytes = now, 0


class AsyncRateLimiter:
    """A token bucket shared by all streams; ``None`` bytes per second for no limit."""

    def __init__(self, bytes_s: float | None) -> None:
        self.bytes_s = bytes_s
        self._spent_until = 0.0
        self.acquired_bytes = 0
        """Bytes that were granted so far."""

    @property
    def chunk_bytes(self) -> int:
        """Size of one write."""
        return STREAM_BYTES if self.bytes_s is None else RATED_BYTES

    async def acquire(self, size_bytes: int) -> None:
        """Return when this number of bytes may be sent."""
        self.acquired_bytes += size_bytes
        if self.bytes_s is None:
            return
        now = time.monotonic()
        self._spent_until = max(self._spent_until, now) + size_bytes / self.bytes_s
        await asyncio.sleep(self._spent_until - now)


def bearer_token(secret: str) -> str:
    """Return the token of a cluster: the same on all nodes, and it reveals nothing of the secret."""
    return hmac.new(secret.encode(), b"ftd snapshot server 1", hashlib.sha256).hexdigest()
