"""What scripts, the keepers of their hosts and keepers among themselves say to each other: JSON over HTTP.

A *keeper* is the daemon of a host that keeps scripts' snapshots (``ftd node --snapshots-only``). A script
reaches its own host's through a unix socket, which only its user can open:

    GET  /v1/info             Facts: who it is, where snapshots are to be written
    GET  /v1/held/<job>        Held, of each snapshot that it or its configured peers have
    POST /v1/protect             Run: this run's snapshots are to be protected from now on
    POST /v1/fetch             Wanted → Brought: files with what is not in this host's memory
    POST /v1/remove/<job>      the job is over

Keepers reach each other at their snapshot ports, with the token of ``ftd.snapshots.shards.protocol``:

    GET  /scripts/held/<job>   Held, of each snapshot that it has
    POST /scripts/pin          Protect: your ranks must keep this one; answers when all of them have it
    POST /scripts/copy         Protect: copy what you are a buddy for; answers when it is done
    POST /scripts/release       Protect: every host has done so; what is older may go
    POST /scripts/remove/<job>
"""

from pathlib import Path

import msgspec

from storage.errors import CorruptDataError
from storage.manifest import read_record, write_record

SnapshotKey = tuple[int, int]
"""Generation and step: later runs come after earlier ones, whatever their steps."""

RETAINED_FILE = "retained.json"
SOCKET = "snapshot-agent.sock"


class RankSnapshotLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank's snapshot consists of: ``Manifest.layout``."""

    kind: str = "snapshotter"
    rank: int
    ranks: int
    own_bytes: int
    """Of what is this rank's alone; it is complete with its header."""
    shared_bytes: int = 0
    """Of what is the same on all ranks; kept by the hosts together, after a code."""
    scheme: str = "none"
    owners: int = 1
    """Hosts that keep it."""
    owner: int = -1
    """Whose shard is in this snapshot; -1: none, another rank of the host keeps it."""


class SnapshotAgentInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A keeper."""

    node: str
    address: str
    """host:port, for other keepers."""
    directory: str
    """Where this host's scripts write: one directory for each job."""
    peers: tuple[str, ...] = ()
    """Further keepers' addresses, of hosts that need not run a rank."""


class HeldRankSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something of a rank's snapshot in some host's memory."""

    address: str
    """The keeper's; empty where there is none, and only the rank itself reaches it."""
    generation: int
    step: int
    layout: RankSnapshotLayout
    is_copy: bool = False
    """A buddy's copy: what is the rank's own, without any shard."""

    @property
    def key(self) -> SnapshotKey:
        return self.generation, self.step


class ProtectedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run whose snapshots are protected."""

    job: str
    generation: int
    hosts: tuple[str, ...]
    """Addresses of the ranks' keepers, in the order of the shards' owners."""
    host_of_rank: tuple[int, ...]
    """By rank: which of ``hosts`` it is on."""
    spare_hosts: tuple[str, ...] = ()
    """Keepers without a rank, that keep copies where the ranks' hosts are too few."""
    restored: SnapshotKey | None = None
    """It goes on behind this one, which stays until the first of its own is protected."""
    copies: int
    """Of what is each rank's own, on other hosts."""

    def copy_holders(self, host: int) -> tuple[str, ...]:
        """Who keeps copies of a host's: the next ones in the ring."""
        ring = self.hosts + self.spare_hosts
        return tuple(ring[(host + ahead) % len(ring)] for ahead in range(1, self.copies + 1))

    def ranks_of(self, address: str) -> tuple[int, ...]:
        return tuple(rank for rank, host in enumerate(self.host_of_rank) if self.hosts[host] == address)

    def hosts_copied_by(self, address: str) -> tuple[int, ...]:
        """The hosts that this one is a buddy of."""
        return tuple(host for host in range(len(self.hosts)) if address in self.copy_holders(host))


class ProtectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of a run, of which something is to be done."""

    run: ProtectedRun
    step: int

    @property
    def key(self) -> SnapshotKey:
        return self.run.generation, self.step


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot for a rank that its host has not got."""

    job: str
    generation: int
    step: int
    rank: int
    """Whose own part it is."""
    own: tuple[str, ...]
    """Who has it; empty: it is not wanted."""
    shards: dict[int, str] = {}
    """Owner of a shard → who has it; empty: there is nothing shared."""
    layout: RankSnapshotLayout


class FetchResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files in the host's memory; empty names for what was not wanted."""

    own: str = ""
    """The rank's own image, and behind it the header."""
    shared: str = ""


class RetainedSnapshots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``<job>/retained.json``: which snapshots a host's ranks must not let go."""

    common: SnapshotKey | None = None
    """The newest that every host has, protected."""
    pinned: SnapshotKey | None = None
    """One that is being protected."""


def read_retained(job: Path) -> RetainedSnapshots:
    try:
        return read_record(job / RETAINED_FILE, RetainedSnapshots)
    except (CorruptDataError, OSError):
        return RetainedSnapshots()


def write_retained(job: Path, kept: RetainedSnapshots) -> None:
    """:raises OSError: it cannot be written."""
    write_record(job / RETAINED_FILE, kept)
