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
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.script.plain_state import SnapshotError
from runtime.script.ranks import Ranks, directory_id
from runtime.script.saved import map_bytes
from runtime.script.tensor_image import Bytes
from runtime.wire.snapshot_agent_protocol import (
    DIRECTORY_SUFFIX,
    SOCKET,
    DecodeSources,
    FetchRequest,
    FetchResult,
    HeldParity,
    HeldRankSnapshot,
    HeldSnapshots,
    ProtectedRun,
    RankSnapshotLayout,
    SnapshotAgentInfo,
    SnapshotKey,
)
from storage.codes import make_code, parse_scheme, solve_lost_cells
from storage.decoding import decodable
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


def parity_scheme(scheme: str, hosts: int) -> str:
    """Return the code of the parity that ``hosts`` hosts hold of each other's own images; empty if they hold
    copies: the scheme asks for them, or there are so few hosts that parity needs as much memory.
    """
    parts = parse_scheme(scheme, ("none", "aec", "aec2"))
    is_parity = len(parts) == 1 and parts[0][0] in ("aec", "aec2")
    return scheme if is_parity and hosts >= tolerated_losses(scheme) + 2 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorableSnapshot:
    """A snapshot that all ranks can restore."""

    key: SnapshotKey
    layout: RankSnapshotLayout
    """Layout of any rank; only the fields that all ranks have in common are used."""
    own: dict[int, tuple[str, ...]]
    """Addresses that hold a rank's own image, by the rank when it was saved."""
    own_bytes: dict[int, int]
    """Size of the own image of each rank whose image is there or can be decoded; its header follows it."""
    shards: dict[int, str]
    """Address of the agent that holds a shard, by the shard's owner."""
    missing: tuple[int, ...] = ()
    """Ranks whose own state is not there, although replicas of their shards may be."""
    decode: dict[int, DecodeSources] = field(default_factory=dict)
    """Sources from which a rank's own image can be decoded if it is lost or corrupt."""

    def source_of(self, rank: int) -> int:
        """Return the rank whose own state a rank restores: its own, unless there were fewer ranks then or that
        state is missing.
        """
        source = rank % self.layout.ranks
        return source if source in self.own_bytes else min(self.own_bytes)

    def sources_near(self, rank: int, ranks: int) -> list[int]:
        """Return the former ranks, those first whose shards a rank of ``ranks`` most likely has a part of."""
        middle = (rank + 0.5) / ranks * self.layout.ranks - 0.5
        return sorted(self.own_bytes, key=lambda source: abs(source - middle))


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSnapshot:
    """A snapshot that cannot be restored from what is left."""

    key: SnapshotKey
    why: str
    missing: tuple[int, ...] = ()
    """Ranks whose own state is not there."""


def find_restorable(
    held: Sequence[HeldRankSnapshot], ranks: int, parity: Sequence[HeldParity] = ()
) -> tuple[list[RestorableSnapshot], list[RejectedSnapshot]]:
    """Return what ``ranks`` ranks can restore, and what they cannot: newest first, but snapshots of which all
    ranks' state is there before others.
    """
    by_key: dict[SnapshotKey, list[HeldRankSnapshot]] = {}
    for one in held:
        by_key.setdefault(one.key, []).append(one)
    found: list[RestorableSnapshot] = []
    rejected: list[RejectedSnapshot] = []
    for key in sorted(by_key, reverse=True):
        made = _examine(key, by_key[key], ranks, [one for one in parity if one.key == key])
        if isinstance(made, RestorableSnapshot):
            found.append(made)
        else:
            rejected.append(made)
    return sorted(found, key=lambda one: bool(one.missing)), rejected


def rank_count_mismatch(layout: RankSnapshotLayout, ranks: int) -> str:
    """Return why a snapshot cannot be restored on ``ranks`` ranks; empty if it can."""
    if layout.ranks == ranks or layout.shared_bytes or layout.resizable:
        return ""
    return (
        f"it was saved by {layout.ranks} ranks, and there are {ranks}: the ranks' own state cannot be resharded; start "
        f"{layout.ranks} ranks again. Another number of ranks can resume where all modules are under DDP or sharded by "
        "FSDP2 (fully_shard), and from a checkpoint that can be resharded (torch.distributed.checkpoint)"
    )


def _examine(
    key: SnapshotKey, held: Sequence[HeldRankSnapshot], ranks: int, parity: Sequence[HeldParity]
) -> RestorableSnapshot | RejectedSnapshot:
    layout = held[0].layout
    common = _common(layout)
    if any(_common(one.layout) != common for one in held):
        return RejectedSnapshot(key=key, why="its parts do not belong together")
    if why := rank_count_mismatch(layout, ranks):
        return RejectedSnapshot(key=key, why=why)
    own: dict[int, tuple[str, ...]] = {}
    for one in held:
        own[one.layout.rank] = (*own.get(one.layout.rank, ()), one.address)
    shards = {one.layout.owner: one.address for one in held if one.layout.owner >= 0 and not one.is_copy}
    # Each rank may need parts of all shards. Of all else, each rank takes one former rank's.
    sharded = layout.resizable and layout.replicas > 0
    needed = set(range(layout.ranks)) if sharded else {rank % layout.ranks for rank in range(ranks)}
    own_bytes = {one.layout.rank: one.layout.own_bytes for one in held}
    decode: dict[int, DecodeSources] = {}
    for rank in sorted(needed):
        if (found := _decode_sources(rank, own, parity)) is not None:
            decode[rank], own_bytes[rank] = found
    missing = tuple(sorted(needed - set(own_bytes)))
    if missing and not (sharded and layout.replicas > 1):
        why = f"the own state of rank {', '.join(map(str, missing[:5]))} is lost"
        return RejectedSnapshot(key=key, why=why, missing=missing)
    if layout.shared_bytes:
        lost = frozenset(range(layout.owners)) - set(shards)
        if solve_lost_cells(make_code(layout.scheme, layout.owners), lost) is None:
            why = f"the shards of {len(lost)} of {layout.owners} hosts are lost: too many for {layout.scheme}"
            return RejectedSnapshot(key=key, why=why)
    return RestorableSnapshot(
        key=key,
        layout=layout,
        own=own,
        own_bytes=own_bytes,
        shards=shards,
        missing=missing,
        decode=decode,
    )


def _decode_sources(
    rank: int, own: Mapping[int, Sequence[str]], parity: Sequence[HeldParity]
) -> tuple[DecodeSources, int] | None:
    """Return the sources from which a rank's image can be decoded, and its size in bytes; ``None`` if too much
    is lost.
    """
    group = [one for one in parity if any(rank in ranks for ranks in one.ranks)]
    if not group:
        return None
    first = group[0]
    sources = DecodeSources(
        scheme=first.scheme,
        ranks=first.ranks,
        images={other: own[other][0] for ranks in first.ranks for other in ranks if other in own},
        parity={one.position: one.address for one in group if one.ranks == first.ranks},
    )
    lost = frozenset(range(len(first.ranks))) - sources.present
    if solve_lost_cells(make_code(first.scheme, len(first.ranks)), lost) is None:
        return None
    sizes = dict(zip(chain(*first.ranks), chain(*first.own_bytes), strict=True))
    return sources, sizes[rank]


def _common(layout: RankSnapshotLayout) -> tuple[int, int, str, int, bool, int]:
    return layout.ranks, layout.shared_bytes, layout.scheme, layout.owners, layout.resizable, layout.replicas


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

    def left_snapshots(self, job: str) -> Path | None:
        """Return where an agent that does not answer has a job's snapshots on this host; ``None`` if it has none."""
        for root in sorted(self.path.parent.glob(f"*{DIRECTORY_SUFFIX}")):
            if any((root / job).glob("*-*/step-*.json")):
                return root / job
        return None

    def facts(self) -> SnapshotAgentInfo:
        """Return who the agent is, and where to write snapshots."""
        return self._request("GET", "/v1/info", None, SnapshotAgentInfo)

    def held(self, job: str) -> HeldSnapshots:
        """Return what the agent or its peers hold of a job's snapshots."""
        return self._request("GET", f"/v1/held/{job}", None, HeldSnapshots)

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


@decodable  # Ranks may be threads.
class _RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's contribution when all ranks meet."""

    here: int
    newest: int
    shared: str
    """Digest of the state that this rank shares with all others; empty if there is none."""
    facts: SnapshotAgentInfo | None
    alone: tuple[HeldRankSnapshot, ...]
    held: HeldSnapshots
    started: bool
    """Whether a run of this rank has begun on its host before."""
    unfit: tuple[str, ...]
    """Reasons why snapshots in this rank's memory cannot be restored."""


@dataclass(slots=True)
class ScriptProtection:
    """The protection of one script's snapshots, as all of its ranks agreed on it."""

    job: str
    scheme: str
    agent: SnapshotAgentClient | None
    agent_facts: SnapshotAgentInfo | None
    unreachable: str = ""
    """Reason why the snapshots that the agent has on this host cannot be restored; empty if there are none, or if it
    answers.
    """
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
            left = agent_client.left_snapshots(str(job))
            unreachable = (
                f"{left} holds snapshots of this job, and its snapshot agent does not answer: start it again"
                if left
                else ""
            )
            return cls(job, scheme, None, None, unreachable=unreachable)

    @property
    def keeps_shard(self) -> bool:
        """Whether this rank saves its host's shard of the shared image."""
        return self.shares and self.owner >= 0

    @property
    def is_requested(self) -> bool:
        """Whether the script asked for protection."""
        return tolerated_losses(self.scheme) > 0

    def shards(self, shared_bytes: int) -> ShardLayout:
        """Return the layout of the shards of the shared image."""
        return ShardLayout(code=make_code(self.scheme, self.owners), bucket_bytes=shared_bytes)

    # --- all ranks together ----------------------------------------------------------------------

    def agree(
        self,
        ranks: Ranks,
        directory: Path,
        own: Sequence[tuple[SnapshotKey, RankSnapshotLayout]],
        newest: int,
        shared: str,
        *,
        started: bool = True,
        unfit: Sequence[str] = (),
    ) -> tuple[list[RestorableSnapshot], list[str]]:
        """Agree on the snapshots that all ranks can restore, newest first, on why there are no others, and on
        this run's generation.

        :param directory: directory of the job on this host.
        :param own: layouts of the snapshots in this rank's arena, and in those of former ranks on this host.
        :param newest: newest generation in this rank's arena.
        :param shared: see ``_RankReport``, also for the two others.
        """
        held = HeldSnapshots()
        if self.agent is not None:
            try:
                held = self.agent.held(self.job)
            except SnapshotAgentError as error:
                log.warning("%s: not protected: %s", self.job, error)
                self.agent = self.agent_facts = None
        alone = tuple(HeldRankSnapshot(address="", generation=g, step=s, layout=one) for (g, s), one in own)
        mine = _RankReport(
            here=directory_id(directory),
            # The time distinguishes this run from those of a job of the same name that was removed.
            newest=max([newest, time.time_ns() // 1_000_000, *(one.generation for one in held.ranks)]),
            shared=shared,
            facts=self.agent_facts,
            alone=alone,
            held=held,
            started=started,
            unfit=tuple(unfit),
        )
        rows = [
            msgspec.msgpack.decode(row, type=_RankReport)
            for row in ranks.gather_bytes(msgspec.msgpack.encode(mine))
        ]
        self.generation = max(row.newest for row in rows) + 1
        self.same_host = [r for r, row in enumerate(rows) if row.here == mine.here and r != ranks.rank]
        self._assign(rows, ranks)
        available = [one for row in rows for one in (row.held.ranks if self.active else row.alone)]
        parity = [one for row in rows for one in row.held.parity]
        if self.active:
            available = list(
                {(one.key, one.address, one.layout.rank, one.is_copy): one for one in available}.values()
            )
        found, rejected = find_restorable(available, ranks.count, parity)
        if not self.active and len({row.here for row in rows}) > 1:
            apart = [one for one in found if one.missing or one.layout.ranks != ranks.count]
            found = [one for one in found if one not in apart]
            why = "its ranks are on several hosts, and resharding among hosts needs snapshot agents (protection=)"
            rejected += [RejectedSnapshot(key=one.key, why=why) for one in apart]
        # A rank never releases its only snapshot. One that has begun a run and holds none had not completed
        # its first one, so the other ranks' first snapshot was never a snapshot of all ranks.
        holders = {one.layout.rank for one in available}
        never = {r for r, row in enumerate(rows) if row.started and not row.unfit and r not in holders}
        why_not = [why for row in rows for why in row.unfit]
        unborn = [one for one in found if one.missing and never.issuperset(one.missing)]
        found = [one for one in found if one not in unborn]
        rejected += [RejectedSnapshot(key=one.key, why="", missing=one.missing) for one in unborn]
        for one in rejected:
            # Ranks release older snapshots one after the other, so remains of them are no loss.
            if not found or one.key > found[0].key:
                if one.missing and never.issuperset(one.missing):
                    log.warning(
                        "%s: the first snapshot (step %d) was not yet complete on all ranks",
                        self.job, one.key[1],
                    )  # fmt: skip
                else:
                    log.warning(
                        "%s: the snapshot of step %d cannot be restored: %s", self.job, one.key[1], one.why
                    )
                    why_not.append(f"step {one.key[1]}: {one.why}")
        return found, list(dict.fromkeys(why_not))

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
        parity = "" if spare else parity_scheme(self.scheme, len(hosts))
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
            copies=0 if parity else copies,
            parity=parity,
        )

    def start(self, restored: SnapshotKey | None) -> None:
        """Have the agents protect this run's snapshots."""
        if self.agent is not None and self._run is not None and self.active:
            try:
                self.agent.protect(msgspec.structs.replace(self._run, restored=restored))
            except SnapshotAgentError as error:
                log.warning("%s: not protected: %s", self.job, error)

    # --- fetching from other hosts ------------------------------------------------------------------

    def fetch(
        self, found: RestorableSnapshot, source: int, *, own: bool = False, shared: bool = False
    ) -> Bytes:
        """Return the own image of rank ``source`` followed by its header, or the shared image.

        :raises SnapshotAgentError: it cannot be fetched.
        """
        if self.agent is None or not self.active:
            raise SnapshotAgentError(
                "parts of it are on other hosts, and there is no snapshot agent to fetch them"
            )
        generation, step = found.key
        fetched = self.agent.fetch(
            FetchRequest(
                job=self.job,
                generation=generation,
                step=step,
                rank=source,
                own=found.own.get(source, ()) if own else (),
                decode=found.decode.get(source) if own else None,
                shards=found.shards if shared else {},
                layout=found.layout,
            )
        )
        try:
            return map_bytes(fetched.own if own else fetched.shared)
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
