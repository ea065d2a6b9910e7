"""Protection of a script's snapshots among its ranks' hosts: who they are, what each keeps, what is left.

What is the same on all ranks (DDP) is kept by the hosts together: each its segment and its parity, made from
its own memory without network traffic. What is a rank's own is copied to buddy hosts by their keepers. Both
withstand the same losses. Without a keeper on each host everything stays as it is without protection.

``find_restorable`` says which snapshots of a run can be restored from what is left in the memory of some
hosts, and from
whom. ``SnapshotAgentClient`` is this host's, as a script sees it: HTTP over a unix socket, without asyncio.
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
"""For what a keeper knows, or may have to ask its peers."""
FETCH_TIMEOUT_S = 1800.0
"""For many gigabytes over a slow network."""


def scheme_of(protection: str) -> str:
    """The scheme of ``storage.codes`` for what a script asks for: ``buddy`` is a copy on the next host."""
    return "+".join("arc:1" if part.strip() == "buddy" else part.strip() for part in protection.split("+"))


def tolerated_losses(scheme: str) -> int:
    """Hosts that may be lost, where there are enough of them.

    :raises ValueError: no protection of a script's snapshots.
    """
    parts = parse_scheme(scheme, ("none", "aec", "aec2"))
    return sum({"none": 0, "arc": count, "aec": 1, "aec2": 2}[name] for name, count in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorableSnapshot:
    """A snapshot that all ranks can have."""

    key: SnapshotKey
    layout: RankSnapshotLayout
    """Of some rank's: what they have in common counts."""
    own: dict[int, tuple[str, ...]]
    """Rank of then → who has what is its own."""
    shards: dict[int, str]
    """Owner → who has its shard."""

    def source_of(self, rank: int) -> int:
        """The rank of then whose own part a rank of now takes: its own, while there was one."""
        return rank % self.layout.ranks


def find_restorable(
    held: Sequence[HeldRankSnapshot], ranks: int
) -> tuple[list[RestorableSnapshot], list[tuple[SnapshotKey, str]]]:
    """What ``ranks`` ranks can restore, the newest first; and what they cannot, with the reason."""
    by_key: dict[SnapshotKey, list[HeldRankSnapshot]] = {}
    for one in held:
        by_key.setdefault(one.key, []).append(one)
    found: list[RestorableSnapshot] = []
    refused: list[tuple[SnapshotKey, str]] = []
    for key in sorted(by_key, reverse=True):
        made = _looked_at(key, by_key[key], ranks)
        if isinstance(made, RestorableSnapshot):
            found.append(made)
        else:
            refused.append((key, made))
    return found, refused


def rank_count_mismatch(written: int, ranks: int) -> str:
    """Why what so many ranks kept is not restored on another number."""
    return (
        f"it is of {written} ranks, and there are {ranks}: what each rank kept for itself is not cut anew; "
        f"start with {written} ranks again. Another number can go on where DDP's ranks of several hosts were "
        "protected (protection=), and from a checkpoint that can be resharded (torch.distributed.checkpoint)"
    )


def _looked_at(key: SnapshotKey, held: Sequence[HeldRankSnapshot], ranks: int) -> RestorableSnapshot | str:
    layout = held[0].layout
    common = _common(layout)
    if any(_common(one.layout) != common for one in held):
        return "its parts do not fit together"
    if layout.ranks != ranks and not layout.shared_bytes:
        return rank_count_mismatch(layout.ranks, ranks)
    own: dict[int, tuple[str, ...]] = {}
    for one in held:
        own[one.layout.rank] = (*own.get(one.layout.rank, ()), one.address)
    shards = {one.layout.owner: one.address for one in held if one.layout.owner >= 0 and not one.is_copy}
    missing = sorted({rank % layout.ranks for rank in range(ranks)} - set(own))
    if missing:
        return f"what was rank {', '.join(map(str, missing[:5]))}'s own is lost"
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
    """It is not there, or could not do what it was asked."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class SnapshotAgentClient:
    """:param path: of its socket; ``$FTD_SNAPSHOT_AGENT``, else where a keeper of this user has it by default."""

    def __init__(self, path: str | Path | None, default: Path) -> None:
        self.path = Path(path or os.environ.get(SOCKET_VARIABLE) or default / SOCKET)

    def facts(self) -> SnapshotAgentInfo:
        return self._ask("GET", "/v1/info", None, SnapshotAgentInfo)

    def held(self, job: str) -> tuple[HeldRankSnapshot, ...]:
        return self._ask("GET", f"/v1/held/{job}", None, tuple[HeldRankSnapshot, ...])

    def protect(self, run: ProtectedRun) -> None:
        self._ask("POST", "/v1/protect", run, dict[str, str])

    def fetch(self, wanted: FetchRequest) -> FetchResult:
        return self._ask("POST", "/v1/fetch", wanted, FetchResult, timeout_s=FETCH_TIMEOUT_S)

    def remove(self, job: str) -> None:
        self._ask("POST", f"/v1/remove/{job}", None, dict[str, str])

    def _ask(
        self, method: str, path: str, body: Any, kind: type[T], *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> T:
        """:raises SnapshotAgentError: it is not there, or could not do it."""
        connection = _UnixConnection(self.path, timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body))
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise SnapshotAgentError(
                f"no keeper answers at {self.path}: {error or type(error).__name__}"
            ) from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise SnapshotAgentError(
                data.decode(errors="replace")[:500] or f"the keeper answered {response.status}"
            )
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SnapshotAgentError(f"the keeper at {self.path} is of another version: {error}") from None


class _Presence(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself when all meet."""

    here: int
    newest: int
    shared: str
    """Digest of what it takes for the same on all ranks; empty: nothing is."""
    facts: SnapshotAgentInfo | None
    alone: tuple[HeldRankSnapshot, ...]
    held: tuple[HeldRankSnapshot, ...]


@dataclass(slots=True)
class Protection:
    job: str
    scheme: str
    agent: SnapshotAgentClient | None
    agent_facts: SnapshotAgentInfo | None
    active: bool = False
    """All ranks have keepers, and there is another host: what is said below is so."""
    owners: int = 1
    owner: int = -1
    """Which shard of what is shared this rank keeps; -1: another rank of its host does so."""
    shares: bool = False
    generation: int = 0
    same_host: list[int] = field(default_factory=list)
    """Other ranks that see the same memory."""
    _run: ProtectedRun | None = None

    @classmethod
    def open(cls, job: str, protection: str, path: str | Path | None, default: Path) -> "Protection":
        """:raises SnapshotError: no such protection."""
        if not isinstance(protection, str):
            raise SnapshotError(f"protection: {protection!r} is no text: write 'buddy', say, or 'none'")
        try:
            scheme = scheme_of(protection)
            tolerated_losses(scheme)
        except ValueError as error:
            raise SnapshotError(f"protection: {error}, and buddy, which is arc:1") from None
        if tolerated_losses(scheme) == 0:
            return cls(job, scheme, None, None)
        keeper = SnapshotAgentClient(path, default)
        try:
            return cls(job, scheme, keeper, keeper.facts())
        except SnapshotAgentError as error:
            log.warning(
                "%s: protection %r needs a keeper on each host (ftd node --snapshots-only); snapshots stay "
                "in this host's memory alone: %s",
                job,
                protection,
                error,
            )
            return cls(job, scheme, None, None)

    @property
    def keeps_shard(self) -> bool:
        """This rank keeps its host's shard of what is shared."""
        return self.shares and self.owner >= 0

    @property
    def is_requested(self) -> bool:
        return tolerated_losses(self.scheme) > 0

    def layout(self, rank: int, ranks: int, own_bytes: int, shared_bytes: int) -> RankSnapshotLayout:
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
        """The snapshots that all ranks can have, the newest first; and a generation for this run.

        :param newest: generation of what lies here. :param shared: see ``_Presence``.
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
        mine = _Presence(
            here=directory_id(directory),
            # Runs of a job that was removed in between are told apart by the time.
            newest=max([newest, time.time_ns() // 1_000_000, *(one.generation for one in held)]),
            shared=shared,
            facts=self.agent_facts,
            alone=alone,
            held=held,
        )
        rows = [
            msgspec.msgpack.decode(row, type=_Presence)
            for row in ranks.gather_bytes(msgspec.msgpack.encode(mine))
        ]
        self.generation = max(row.newest for row in rows) + 1
        self.same_host = [r for r, row in enumerate(rows) if row.here == mine.here and r != ranks.rank]
        self._arrange(rows, ranks)
        kept = [one for row in rows for one in (row.held if self.active else row.alone)]
        if self.active:
            kept = list({(one.key, one.address, one.layout.rank, one.is_copy): one for one in kept}.values())
        found, refused = find_restorable(kept, ranks.count)
        for key, why in refused:
            # Older ones are let go by one rank after the other: what is left of them is no loss.
            if not found or key > found[0].key:
                log.warning("%s: the snapshot of step %d cannot be restored: %s", self.job, key[1], why)
        return found

    def _arrange(self, rows: list[_Presence], ranks: Ranks) -> None:
        """Who keeps what, from now on; the same on all ranks."""
        facts = [row.facts for row in rows]
        present = [one for one in facts if one is not None]
        self.active = bool(present) and len(present) == len(facts)
        if not self.active:
            if self.is_requested and present and ranks.rank == 0:
                without = [rank for rank, one in enumerate(facts) if one is None]
                log.warning("%s: not protected: no keeper at rank %s", self.job, without[0])
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
                "%s: %s withstands the loss of %d hosts, and with %d hosts and %d peers of their keepers it "
                "is %d: start ranks on more hosts, or name node.snapshot_peers",
                self.job, self.scheme, losses, len(hosts), len(spare), copies,
            )  # fmt: skip
        digests = {row.shared for row in rows}
        self.shares = len(hosts) > 1 and len(digests) == 1 and digests != {""}
        if len(hosts) > 1 and len(digests) > 1:
            log.warning(
                "%s: DDP's parameters differ between ranks: each rank's are kept as its own", self.job
            )
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
        """Have the keepers protect this run's snapshots."""
        if self.agent is not None and self._run is not None and self.active:
            try:
                self.agent.protect(msgspec.structs.replace(self._run, restored=restored))
            except SnapshotAgentError as error:
                log.warning("%s: not protected: %s", self.job, error)

    # --- what is on other hosts ------------------------------------------------------------------

    def fetch(self, found: RestorableSnapshot, rank: int, *, own: bool) -> tuple[Bytes, Bytes]:
        """(the rank's own image with its header behind it, the shared image); empty where not wanted.

        :raises SnapshotAgentError: it cannot be had.
        """
        if self.agent is None or not self.active:
            raise SnapshotAgentError("parts of it are on other hosts, and there is no keeper to ask")
        source = found.source_of(rank)
        shared = bool(found.layout.shared_bytes)
        if not own and not shared:
            return EMPTY, EMPTY
        generation, step = found.key
        brought = self.agent.fetch(
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
                map_bytes(brought.own) if brought.own else EMPTY,
                map_bytes(brought.shared) if brought.shared else EMPTY,
            )
        except OSError as error:
            raise SnapshotAgentError(f"what the keeper brought is gone: {error}") from None

    def remove(self) -> None:
        """The job is over: copies go, too."""
        if self.agent is not None:
            try:
                self.agent.remove(self.job)
            except SnapshotAgentError as error:
                log.warning("%s: copies on other hosts may stay: %s", self.job, error)


def rank_layout_of(manifest: SnapshotManifest) -> RankSnapshotLayout | None:
    """``None``: it was not written by a Snapshotter of this version."""
    try:
        return msgspec.convert(manifest.layout, RankSnapshotLayout)
    except msgspec.ValidationError:
        return None
