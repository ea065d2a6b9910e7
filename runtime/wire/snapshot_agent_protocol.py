"""The protocol between scripts and snapshot agents, and among snapshot agents: JSON over HTTP.

A *snapshot agent* is the daemon that protects the snapshots of a host's scripts (``ftd node
--snapshots-only``). A script reaches the agent of its own host through a unix socket, which only its user
can open:

    GET  /v1/info              returns SnapshotAgentInfo: who the agent is, and where to write snapshots
    GET  /v1/held/<job>        returns HeldSnapshots: what it or its configured peers have
    POST /v1/protect           ProtectedRun: protect this run's snapshots from now on
    POST /v1/fetch             FetchRequest → FetchResult: fetch what is not in this host's memory
    POST /v1/remove/<job>      remove all snapshots of a job that is over

Agents reach each other at their snapshot ports, with the token of ``ftd.snapshots.shards.protocol``:

    GET  /scripts/held/<job>   returns HeldSnapshots: what this agent has
    POST /scripts/pin          ProtectRequest: retain this step on your ranks; answered when all of them
        have it
    POST /scripts/copy         ProtectRequest: copy what this host holds for others, or compute its parity of
        them; answered when that is done
    POST /scripts/release      ProtectRequest: all hosts have the step protected; older ones may be released
    POST /scripts/remove/<job>
"""

from itertools import pairwise
from pathlib import Path

import msgspec

from storage.errors import CorruptDataError
from storage.manifest import SnapshotPart, read_record, write_record

SnapshotKey = tuple[int, int]
"""Generation and step. Later runs compare greater than earlier ones, whatever their steps."""

MOST_PARITY_HOSTS = 8
"""Largest number of hosts that share a code: a larger group needs less memory, but the hosts read more to decode."""
RETAINED_FILE = "retained.json"
SOCKET = "snapshot-agent.sock"
DIRECTORY_SUFFIX = ".scripts"
"""End of the name of an agent's directory, which is next to its socket."""


class RankSnapshotLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a rank's snapshot, as stored in ``SnapshotManifest.layout``."""

    kind: str = "snapshotter"
    rank: int
    ranks: int
    own_bytes: int
    """Bytes of the rank's own image, without the header that makes it complete."""
    shared_bytes: int = 0
    """Bytes of the image that is the same on all ranks, which the hosts save together with a code."""
    scheme: str = "none"
    owners: int = 1
    """Number of hosts that save the shared image."""
    owner: int = -1
    """Index of the shard in this snapshot; -1 if another rank of the host saves it."""
    resizable: bool = False
    """Whether another number of ranks can restore it: modules are replicated by DDP or consist of DTensors."""
    replicas: int = 0
    """Number of ranks that hold each part of the DTensors (HSDP); 0 if there are none."""


class SnapshotAgentInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot agent."""

    node: str
    address: str
    """host:port for other agents."""
    directory: str
    """Directory in which this host's scripts write; it has one subdirectory for each job."""
    peers: tuple[str, ...] = ()
    """Addresses of other agents, whose hosts need not run a rank."""


class HeldRankSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a rank's snapshot in the memory of a host."""

    address: str
    """Address of the host's agent; empty if there is none and only the rank itself can access it."""
    generation: int
    step: int
    layout: RankSnapshotLayout
    is_copy: bool = False
    """Whether the part is a copy of another host's rank: its own image, without a shard."""

    @property
    def key(self) -> SnapshotKey:
        return self.generation, self.step


class RankImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's own image and its header, as one run of bytes."""

    rank: int
    parts: tuple[SnapshotPart, ...]
    """Parts with their offsets in the run, which they fill."""
    own_bytes: int
    """Size of the image, without the header."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class ParityLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a host's parity of other hosts' images, as stored in ``SnapshotManifest.layout``."""

    kind: str = "parity"
    scheme: str
    position: int
    """Index of this host in ``members``."""
    members: tuple[tuple[RankImage, ...], ...]
    """Images of the ranks of each host of the group, in the order of the code's owners. A host's images in this
    order, extended by zeros, are its segment of the code.
    """

    def member_bytes(self, position: int) -> int:
        """Return the size of a host's images."""
        return sum(image.size_bytes for image in self.members[position])


class HeldParity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parity of a group of hosts in the memory of one of them."""

    address: str
    """Address of the host's agent."""
    generation: int
    step: int
    scheme: str
    position: int
    """Index of this host in the group."""
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each host of the group."""
    own_bytes: tuple[tuple[int, ...], ...]
    """Sizes of their own images, without headers."""

    @property
    def key(self) -> SnapshotKey:
        return self.generation, self.step


class HeldSnapshots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Snapshots of ranks, and parity, that are left in the memory of hosts."""

    ranks: tuple[HeldRankSnapshot, ...] = ()
    parity: tuple[HeldParity, ...] = ()

    def __add__(self, other: "HeldSnapshots") -> "HeldSnapshots":
        return HeldSnapshots(ranks=self.ranks + other.ranks, parity=self.parity + other.parity)


class ProtectedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run whose snapshots are protected."""

    job: str
    generation: int
    hosts: tuple[str, ...]
    """Addresses of the ranks' agents, in the order of the shards' owners."""
    host_of_rank: tuple[int, ...]
    """Index of each rank's host in ``hosts``."""
    spare_hosts: tuple[str, ...] = ()
    """Agents without a rank, which hold copies where the ranks' hosts are too few."""
    restored: SnapshotKey | None = None
    """Snapshot from which the run continues; it is retained until the run's first own snapshot is protected."""
    copies: int
    """Number of copies of each rank's own image on other hosts."""
    parity: str = ""
    """Scheme of the parity of the ranks' own images that the hosts hold instead of copies; empty for copies."""

    def parity_group(self, address: str) -> tuple[int, ...]:
        """Return the hosts that share a code with an agent's host; empty if it holds no parity."""
        if not self.parity or address not in self.hosts:
            return ()
        host = self.hosts.index(address)
        return next(tuple(some) for some in parity_groups(len(self.hosts)) if host in some)

    def copy_holders(self, host: int) -> tuple[str, ...]:
        """Return the agents that hold copies of a host's images: the next ones in the ring."""
        ring = self.hosts + self.spare_hosts
        return tuple(ring[(host + ahead) % len(ring)] for ahead in range(1, self.copies + 1))

    def ranks_of(self, address: str) -> tuple[int, ...]:
        """Return the ranks on the host of an agent."""
        return tuple(rank for rank, host in enumerate(self.host_of_rank) if self.hosts[host] == address)

    def hosts_copied_by(self, address: str) -> tuple[int, ...]:
        """Return the hosts whose images this agent holds copies of."""
        return tuple(host for host in range(len(self.hosts)) if address in self.copy_holders(host))


class ProtectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of a run, with which an agent does what the path of the request says."""

    run: ProtectedRun
    step: int

    @property
    def key(self) -> SnapshotKey:
        return self.run.generation, self.step


class DecodeSources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents from whose images and parity a lost rank's own image is decoded."""

    scheme: str
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each host of the group."""
    images: dict[int, str]
    """Agent that has a rank's own image."""
    parity: dict[int, str]
    """Agent that has a host's parity, by the host's index in the group."""

    @property
    def present(self) -> frozenset[int]:
        """Hosts of the group whose images and parity are there."""
        return frozenset(
            host
            for host, ranks in enumerate(self.ranks)
            if host in self.parity and all(rank in self.images for rank in ranks)
        )


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for a snapshot that this host does not have."""

    job: str
    generation: int
    step: int
    rank: int
    """Rank whose own image is fetched."""
    own: tuple[str, ...]
    """Agents that have the rank's own image; empty if it is not requested."""
    decode: DecodeSources | None = None
    """Sources from which the rank's own image is decoded if no agent has it."""
    shards: dict[int, str] = {}
    """Agent that has a shard, by the shard's owner; empty if there is no shared image."""
    layout: RankSnapshotLayout


class FetchResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files in the host's memory; a name is empty if that image was not requested."""

    own: str = ""
    """File with the rank's own image, followed by its header."""
    shared: str = ""


class RetainedSnapshots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``<job>/retained.json``: snapshots that a host's ranks must not release."""

    common: SnapshotKey | None = None
    """The newest snapshot that all hosts have protected."""
    pinned: SnapshotKey | None = None
    """A snapshot that is being protected."""


def parity_groups(hosts: int) -> list[range]:
    """Return the groups of hosts that share a code, each of at most ``MOST_PARITY_HOSTS`` and about equal."""
    count = -(-hosts // MOST_PARITY_HOSTS)
    ends = [hosts * number // count for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def read_retained(job: Path) -> RetainedSnapshots:
    """Return the content of a job's file; nothing is retained if it is missing or corrupt."""
    try:
        return read_record(job / RETAINED_FILE, RetainedSnapshots)
    except (CorruptDataError, OSError):
        return RetainedSnapshots()


def write_retained(job: Path, retained: RetainedSnapshots) -> None:
    """Write the file of a job.

    :raises OSError: it cannot be written.
    """
    write_record(job / RETAINED_FILE, retained)
