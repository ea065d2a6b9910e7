"""The places where bytes of other nodes' snapshots are read, the requests for them, and the checks of the
answers.
"""

from dataclasses import dataclass

from yarl import URL

from ftd.errors import PeerError
from storage.manifest import SnapshotPart


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSource:
    """A node's snapshot server."""

    node: str
    address: str
    """host:port"""

    def __str__(self) -> str:
        return f"the snapshot server of {self.node} ({self.address})"

    def url(self, path: str, *, secure: bool = False) -> URL:
        """Return the URL of a path on this server.

        :raises ValueError: the address is not host:port.
        """
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        return URL.build(
            scheme="https" if secure else "http",
            host=f"[{host}]" if ":" in host else host,
            port=int(port),
            path=path,
            encoded=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLocation:
    """A part, and the node that holds it. Parts of one name on several nodes may differ in their bytes."""

    source: SnapshotSource
    job_id: str
    step: int
    part: SnapshotPart


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """Bytes of a part from ``first`` on, as many as ``into`` has room for."""

    location: PartLocation
    first: int
    into: memoryview


class SourceBusy(Exception):
    """The node serves as many readers as it can; ask again later."""


def check_status(source: SnapshotSource, status: int, wanted: int) -> None:
    match status:
        case 503:
            raise SourceBusy
        case 401:
            raise PeerError(f"{source} rejects our token: check that all nodes have the same secret")
        case 404 | 412:
            raise PeerError(f"{source} does not have this snapshot any more")
        case _ if status != wanted:
            raise PeerError(f"{source} answered with status {status}")
