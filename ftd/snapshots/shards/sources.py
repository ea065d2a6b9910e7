"""Where other nodes' bytes are read, what of them is wanted, and what these nodes may answer."""

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
        """:raises ValueError: the address is no host:port."""
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
    """A part, and the node that has it. What several nodes call by one name may differ in its bytes."""

    source: SnapshotSource
    job_id: str
    step: int
    part: SnapshotPart


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """Bytes ``first`` … of a part, as many as ``into`` has room for; from the first place that gives them."""

    places: tuple[PartLocation, ...]
    first: int
    into: memoryview


class Busy(Exception):
    """The node has as many readers as it wants: ask again."""


def check_status(source: SnapshotSource, status: int, wanted: int) -> None:
    match status:
        case 503:
            raise Busy
        case 401:
            raise PeerError(f"{source} does not accept our token: is the secret the same on all nodes?")
        case 404 | 412:
            raise PeerError(f"{source} does not have this snapshot any more")
        case _ if status != wanted:
            raise PeerError(f"{source} answered {status}")
