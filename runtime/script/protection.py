"""Protection of a script's snapshots among the hosts of its ranks: which hosts there are, what each saves, and
what is left.

State that is the same on all ranks (DDP) is saved by the hosts together: each makes its segment and its
parity from its own memory, without network traffic. Each rank's own state is copied to other hosts by their
snapshot agents. Both withstand the same losses. Without a snapshot agent on each host, snapshots are as
without protection.

``find_restorable`` returns the snapshots of a run that can be restored from what is left in the memory of
some hosts, and from whom. ``SnapshotAgentClient`` is a script's client of its host's agent: HTTP over a
unix socket, without asyncio.
"""

import http.client
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.script.plain_state import SnapshotError
from runtime.script.ranks import Ranks, directory_id
from runtime.script.saved import EMPTY, map_bytes
from runtime.script.tensor_image import Bytes
from runtime.wire.snapshot_agent_protocol import (
    SOCKET,
    FetchRequest,
    FetchResult,
    HeldRankSnapshot,
    ProtectedRun,
    RankSnapshotLayout,
    SnapshotAgentInfo,
    SnapshotKey,
)
from storage.codes import make_code, parse_scheme, solve_lost_cells
from storage.manifest import SnapshotManifest
from storage.shards import ShardLayout

log = logging.getLogger("ftd.snapshotter")
T = TypeVar("T")

SOCKET_VARIABLE = "FTD_SNAPSHOT_AGENT"
REQUEST_TIMEOUT_S = 10.0
"""Timeout of requests that an agent answers at once, or after asking its peers."""
FETCH_TIMEOUT_S = 1800.0
"""Timeout of a fetch: many gigabytes over a slow network."""


def scheme_of(protection: str) -> str:
    """Return the scheme of ``storage.codes`` for a script's ``protection``; ``buddy`` is a copy on the next
    host.
    """
    return "+".join("arc:1" if part.strip() == "buddy" else part.strip() for part in protection.split("+"))


def tolerated_losses(scheme: str) -> int:
    """Return the number of hosts that may be lost, provided that there are enough of them.

    :raises ValueError: the scheme does not protect a script's snapshots.
    """
    parts = parse_scheme(scheme, ("none", "aec", "aec2"))
    return sum({"none": 0, "arc": count, "aec": 1, "aec2": 2}[name] for name, count in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorableSnapshot:
    """A snapshot that all ranks can restore."""

    key: SnapshotKey
    layout: RankSnapshotLayout
    """Layout of any rank; only the fields that all ranks have in common are used."""
    own: dict[int, tuple[str, ...]]
    """Addresses that hold a rank's own image, by the rank when it was saved."""
    shards: dict[int, str]
    """Address of the agent that holds a shard, by the shard's owner."""

    def source_of(self, rank: int) -> int:
        """Return the rank whose own image a rank restores: its own, unless there were fewer ranks then."""
        return rank % self.layout.ranks


def find_restorable(
    held: Sequence[HeldRankSnapshot], ranks: int
) -> tuple[list[RestorableSnapshot], list[tuple[SnapshotKey, str]]]:
    """Return what ``ranks`` ranks can restore, newest first, and what they cannot, with the reason."""
    by_key: dict[SnapshotKey, list[HeldRankSnapshot]] = {}
    for one in held:
        by_key.setdefault(one.key, []).append(one)
    found: list[RestorableSnapshot] = []
    rejected: list[tuple[SnapshotKey, str]] = []
    for key in sorted(by_key, reverse=True):
        made = _examine(key, by_key[key], ranks)
        if isinstance(made, RestorableSnapshot):
            found.append(made)
        else:
            rejected.append((key, made))
    return found, rejected


def rank_count_mismatch(written: int, ranks: int) -> str:
    """Return why a snapshot of ``written`` ranks cannot be restored on ``ranks`` ranks."""
    return (
        f"it was saved by {written} ranks, and there are {ranks}: the ranks' own state cannot be resharded; "
        f"start {written} ranks again. Another number of ranks can resume where DDP's ranks of several hosts were "
        "protected (protection=), and from a checkpoint that can be resharded (torch.distributed.checkpoint)"
    )


def _examine(key: SnapshotKey, held: Sequence[HeldRankSnapshot], ranks: int) -> RestorableSnapshot | str:
    layout = held[0].layout
    common = _common(layout)
    if any(_common(one.layout) != common for one in held):
        return "its parts do not belong together"
    if layout.ranks != ranks and not layout.shared_bytes:
        return rank_count_mismatch(layout.ranks, ranks)
    own: dict[int, tuple[str, ...]] = {}
    for one in held:
        own[one.layout.rank] = (*own.get(one.layout.rank, ()), one.address)
    shards = {one.layout.owner: one.address for one in held if one.layout.owner >= 0 and not one.is_copy}
    missing = sorted({rank % layout.ranks for rank in range(ranks)} - set(own))
    if missing:
        return f"the own state of rank {', '.join(map(str, missing[:5]))} is lost"
    if layout.shared_bytes:
        lost = frozenset(range(layout.owners)) - set(shards)
        if solve_lost_cells(make_code(layout.scheme, layout.owners), lost) is None:
            return (
                f"the shards of {len(lost)} of {layout.owners} hosts are lost: too many for {layout.scheme}"
            )
    return RestorableSnapshot(key=key, layout=layout, own=own, shards=shards)


def _common(layout: RankSnapshotLayout) -> tuple[int, int, str, int]:
    return layout.ranks, layout.shared_bytes, layout.scheme, layout.owners


class SnapshotAgentError(SnapshotError):
    """The snapshot agent cannot be reached, or could not do what it was asked."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class SnapshotAgentClient:
    """The snapshot agent of this host, over its unix socket.

    :param path: path of the socket; the default is ``$FTD_SNAPSHOT_AGENT``, or else where an agent of this
        user puts it.
    """

    def __init__(self, path: str | Path | None, default: Path) -> None:
        self.path = Path(path or os.environ.get(SOCKET_VARIABLE) or default / SOCKET)

    def facts(self) -> SnapshotAgentInfo:
        """Return who the agent is, and where to write snapshots."""
        return self._request("GET", "/v1/info", None, SnapshotAgentInfo)

    def held(self, job: str) -> tuple[HeldRankSnapshot, ...]:
        """Return the snapshots of a job that the agent or its peers hold."""
        return self._request("GET", f"/v1/held/{job}", None, tuple[HeldRankSnapshot, ...])

    def protect(self, run: ProtectedRun) -> None:
        """Have the agent protect a run's snapshots from now on."""
        self._request("POST", "/v1/protect", run, dict[str, str])

    def fetch(self, wanted: FetchRequest) -> FetchResult:
        """Have the agent fetch images into files in this host's memory."""
        return self._request("POST", "/v1/fetch", wanted, FetchResult, timeout_s=FETCH_TIMEOUT_S)

    def remove(self, job: str) -> None:
        """Remove all snapshots of a job."""
        self._request("POST", f"/v1/remove/{job}", None, dict[str, str])

    def _request(
        self, method: str, path: str, body: Any, kind: type[T], *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> T:
        """:raises SnapshotAgentError: the agent cannot be reached, or could not do it."""
        connection = _UnixConnection(self.path, timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body))
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise SnapshotAgentError(
                f"no snapshot agent answers at {self.path}: {error or type(error).__name__}"
            ) from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise SnapshotAgentError(
                data.decode(errors="replace")[:500] or f"the snapshot agent answered {response.status}"
            )
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SnapshotAgentError(
                f"the snapshot agent at {self.path} has another version: {error}"
            ) from None


class _RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's contribution when all ranks meet."""

    here: int
    newest: int
    shared: str
    """Digest of the state that this rank shares with all others; empty if there is none."""
    facts: SnapshotAgentInfo | None
    alone: tuple[HeldRankSnapshot, ...]
    held: tuple[HeldRankSnapshot, ...]


@dataclass(slots=True)
class ScriptProtection:
    """The protection of one script's snapshots, as all of its ranks agreed on it."""

    job: str
    scheme: str
    agent: SnapshotAgentClient | None
    agent_facts: SnapshotAgentInfo | None
    active: bool = False
    """Whether all ranks have a snapshot agent; only then the fields below apply."""
    owners: int = 1
    owner: int = -1
    """Index of the shard of the shared image that this rank saves; -1 if another rank of its host does."""
    shares: bool = False
    generation: int = 0
    same_host: list[int] = field(default_factory=list)
    """Other ranks that use the same directory."""
    _run: ProtectedRun | None = None

    @classmethod
    def open(cls, job: str, protection: str, path: str | Path | None, default: Path) -> "ScriptProtection":
        """Return the protection that a script asked for, or none with a warning if no agent answers.

        :raises SnapshotError: there is no such protection.
        """
        if not isinstance(protection, str):
            raise SnapshotError(f"protection: {protection!r} must be a string, such as 'buddy' or 'none'")
        try:
            scheme = scheme_of(protection)
            tolerated_losses(scheme)
        except ValueError as error:
            raise SnapshotError(f"protection: {error}, and buddy, which is arc:1") from None
        if tolerated_losses(scheme) == 0:
            return cls(job, scheme, None, None)
        agent_client = SnapshotAgentClient(path, default)
        try:
            return cls(job, scheme, agent_client, agent_client.facts())
        except SnapshotAgentError as error:
            log.warning(
                "%s: protection %r needs a snapshot agent on each host (ftd node --snapshots-only); snapshots stay "
                "in this host's memory alone: %s",
                job,
                protection,
                error,
            )
            return cls(job, scheme, None, None)

    @property
    def keeps_shard(self) -> bool:
        """Whether this rank saves its host's shard of the shared image."""
        return self.shares and self.owner >= 0

    @property
    def is_requested(self) -> bool:
        """Whether the script asked for protection."""
        return tolerated_losses(self.scheme) > 0

    def layout(self, rank: int, ranks: int, own_bytes: int, shared_bytes: int) -> RankSnapshotLayout:
        """Return the layout of a snapshot of this rank."""
        shared = bool(shared_bytes)
        return RankSnapshotLayout(
            rank=rank,
            ranks=ranks,
            own_bytes=own_bytes,
            shared_bytes=shared_bytes,
            scheme=self.scheme if shared else "none",
            owners=self.owners if shared else 1,
            owner=self.owner if shared else -1,
        )

    def shards(self, shared_bytes: int) -> ShardLayout:
        """Return the layout of the shards of the shared image."""
        return ShardLayout(code=make_code(self.scheme, self.owners), bucket_bytes=shared_bytes)

    # --- all ranks together ----------------------------------------------------------------------

    def agree(
        self,
        ranks: Ranks,
        directory: Path,
        own: Mapping[SnapshotKey, RankSnapshotLayout],
        newest: int,
        shared: str,
    ) -> list[RestorableSnapshot]:
        """Agree on the snapshots that all ranks can restore, newest first, and on this run's generation.

        :param directory: directory of the job on this host.
        :param own: layouts of the snapshots in this rank's arena.
        :param newest: newest generation in this rank's arena.
        :param shared: see ``_RankReport``.
        """
        held: tuple[HeldRankSnapshot, ...] = ()
        if self.agent is not None:
            try:
                held = self.agent.held(self.job)
            except SnapshotAgentError as error:
                log.warning("%s: not protected: %s", self.job, error)
                self.agent = self.agent_facts = None
        alone = tuple(
            HeldRankSnapshot(address="", generation=g, step=s, layout=one) for (g, s), one in own.items()
        )
        mine = _RankReport(
            here=directory_id(directory),
            # The time distinguishes this run from those of a job of the same name that was removed.
            newest=max([newest, time.time_ns() // 1_000_000, *(one.generation for one in held)]),
            shared=shared,
            facts=self.agent_facts,
            alone=alone,
            held=held,
        )
        rows = [
            msgspec.msgpack.decode(row, type=_RankReport)
            for row in ranks.gather_bytes(msgspec.msgpack.encode(mine))
        ]
        self.generation = max(row.newest for row in rows) + 1
        self.same_host = [r for r, row in enumerate(rows) if row.here == mine.here and r != ranks.rank]
        self._assign(rows, ranks)
        available = [one for row in rows for one in (row.held if self.active else row.alone)]
        if self.active:
            available = list(
                {(one.key, one.address, one.layout.rank, one.is_copy): one for one in available}.values()
            )
        found, rejected = find_restorable(available, ranks.count)
        for key, why in rejected:
            # Ranks release older snapshots one after the other, so remains of them are no loss.
            if not found or key > found[0].key:
                log.warning("%s: the snapshot of step %d cannot be restored: %s", self.job, key[1], why)
        return found

    def _assign(self, rows: list[_RankReport], ranks: Ranks) -> None:
        """Decide which host saves what from now on; all ranks come to the same result."""
        facts = [row.facts for row in rows]
        present = [one for one in facts if one is not None]
        self.active = bool(present) and len(present) == len(facts)
        if not self.active:
            if self.is_requested and present and ranks.rank == 0:
                without = [rank for rank, one in enumerate(facts) if one is None]
                log.warning("%s: not protected: no snapshot agent answers at rank %s", self.job, without[0])
            return
        hosts = tuple(dict.fromkeys(one.address for one in present))
        losses, places = tolerated_losses(self.scheme), [hosts.index(one.address) for one in present]
        spare: tuple[str, ...] = ()
        if len(hosts) <= losses:
            others = dict.fromkeys(peer for one in present for peer in one.peers if peer not in hosts)
            spare = tuple(others)[: losses + 1 - len(hosts)]
        copies = min(losses, len(hosts) + len(spare) - 1)
        if copies < losses and ranks.rank == 0:
            log.warning(
                "%s: %s withstands the loss of %d hosts, but with %d hosts and %d peers of their agents it "
                "withstands only %d: start ranks on more hosts, or set node.snapshot_peers",
                self.job, self.scheme, losses, len(hosts), len(spare), copies,
            )  # fmt: skip
        digests = {row.shared for row in rows}
        self.shares = len(hosts) > 1 and len(digests) == 1 and digests != {""}
        if len(hosts) > 1 and len(digests) > 1:
            log.warning("%s: DDP's parameters differ between ranks: each rank saves its own", self.job)
        mine = places[ranks.rank]
        self.owners, self.owner = len(hosts), -1
        if self.shares and places.index(mine) == ranks.rank:
            self.owner = mine
        self._run = ProtectedRun(
            job=self.job,
            generation=self.generation,
            hosts=hosts,
            host_of_rank=tuple(places),
            spare_hosts=spare,
            copies=copies,
        )

    def start(self, restored: SnapshotKey | None) -> None:
        """Have the agents protect this run's snapshots."""
        if self.agent is not None and self._run is not None and self.active:
            try:
                self.agent.protect(msgspec.structs.replace(self._run, restored=restored))
            except SnapshotAgentError as error:
                log.warning("%s: not protected: %s", self.job, error)

    # --- fetching from other hosts ------------------------------------------------------------------

    def fetch(self, found: RestorableSnapshot, rank: int, *, own: bool) -> tuple[Bytes, Bytes]:
        """Return the rank's own image followed by its header, and the shared image; each is empty if it is not
        needed.

        :param own: whether the rank's own image is needed.
        :raises SnapshotAgentError: they cannot be fetched.
        """
        if self.agent is None or not self.active:
            raise SnapshotAgentError(
                "parts of it are on other hosts, and there is no snapshot agent to fetch them"
            )
        source = found.source_of(rank)
        shared = bool(found.layout.shared_bytes)
        if not own and not shared:
            return EMPTY, EMPTY
        generation, step = found.key
        fetched = self.agent.fetch(
            FetchRequest(
                job=self.job,
                generation=generation,
                step=step,
                rank=source,
                own=found.own[source] if own else (),
                shards=found.shards if shared else {},
                layout=found.layout,
            )
        )
        try:
            return (
                map_bytes(fetched.own) if fetched.own else EMPTY,
                map_bytes(fetched.shared) if fetched.shared else EMPTY,
            )
        except OSError as error:
            raise SnapshotAgentError(f"the files that the snapshot agent fetched are gone: {error}") from None

    def remove(self) -> None:
        """Remove the copies on other hosts as well, since the job is over."""
        if self.agent is not None:
            try:
                self.agent.remove(self.job)
            except SnapshotAgentError as error:
                log.warning("%s: copies on other hosts may remain: %s", self.job, error)


def rank_layout_of(manifest: SnapshotManifest) -> RankSnapshotLayout | None:
    """Return the rank's layout; ``None`` if this version's ``Snapshotter`` did not write the snapshot."""
    try:
        return msgspec.convert(manifest.layout, RankSnapshotLayout)
    except msgspec.ValidationError:
        return None
