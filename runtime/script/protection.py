"""Protection of a script's snapshots among its ranks' hosts: who they are, what each keeps, what is left.

What is the same on all ranks (DDP) is kept by the hosts together: each its segment and its parity, made from
its own memory without network traffic. What is a rank's own is copied to buddy hosts by their keepers. Both
withstand the same losses. Without a keeper on each host everything stays as it is without protection.

``restorable`` says which snapshots of a run can be restored from what is left in the memory of some hosts, and from
whom. ``Keeper`` is this host's, as a script sees it: HTTP over a unix socket, without asyncio.
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
from runtime.script.ranks import Ranks, place_number
from runtime.script.saved import NOTHING, mapped
from runtime.script.tensor_image import Bytes
from runtime.wire.keeper_protocol import SOCKET, Brought, Facts, Held, Key, Layout, Run, Wanted
from storage.codes import make_code, parse_scheme, recipe
from storage.manifest import Manifest
from storage.shards import ShardLayout

log = logging.getLogger("ftd.snapshotter")
T = TypeVar("T")

SOCKET_VARIABLE = "FTD_KEEPER"
ASK_S = 10.0
"""For what a keeper knows, or may have to ask its peers."""
BRING_S = 1800.0
"""For many gigabytes over a slow network."""


def code_of(protection: str) -> str:
    """The scheme of ``storage.codes`` for what a script asks for: ``buddy`` is a copy on the next host."""
    return "+".join("arc:1" if part.strip() == "buddy" else part.strip() for part in protection.split("+"))


def losses_of(scheme: str) -> int:
    """Hosts that may be lost, where there are enough of them.

    :raises ValueError: no protection of a script's snapshots.
    """
    parts = parse_scheme(scheme, ("none", "aec", "aec2"))
    return sum({"none": 0, "arc": count, "aec": 1, "aec2": 2}[name] for name, count in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """A snapshot that all ranks can have."""

    key: Key
    layout: Layout
    """Of some rank's: what they have in common counts."""
    own: dict[int, tuple[str, ...]]
    """Rank of then → who has what is its own."""
    shards: dict[int, str]
    """Owner → who has its shard."""

    def source_of(self, rank: int) -> int:
        """The rank of then whose own part a rank of now takes: its own, while there was one."""
        return rank % self.layout.ranks


def restorable(held: Sequence[Held], ranks: int) -> tuple[list[Restorable], list[tuple[Key, str]]]:
    """What ``ranks`` ranks can restore, the newest first; and what they cannot, with the reason."""
    by_key: dict[Key, list[Held]] = {}
    for one in held:
        by_key.setdefault(one.key, []).append(one)
    found: list[Restorable] = []
    refused: list[tuple[Key, str]] = []
    for key in sorted(by_key, reverse=True):
        made = _looked_at(key, by_key[key], ranks)
        if isinstance(made, Restorable):
            found.append(made)
        else:
            refused.append((key, made))
    return found, refused


def other_ranks(written: int, ranks: int) -> str:
    """Why what so many ranks kept is not restored on another number."""
    return (
        f"it is of {written} ranks, and there are {ranks}: what each rank kept for itself is not cut anew; "
        f"start with {written} ranks again. Another number can go on where DDP's ranks of several hosts were "
        "protected (protection=), and from a checkpoint that can be resharded (torch.distributed.checkpoint)"
    )


def _looked_at(key: Key, held: Sequence[Held], ranks: int) -> Restorable | str:
    layout = held[0].layout
    common = _common(layout)
    if any(_common(one.layout) != common for one in held):
        return "its parts do not fit together"
    if layout.ranks != ranks and not layout.shared_bytes:
        return other_ranks(layout.ranks, ranks)
    own: dict[int, tuple[str, ...]] = {}
    for one in held:
        own[one.layout.rank] = (*own.get(one.layout.rank, ()), one.address)
    shards = {one.layout.owner: one.address for one in held if one.layout.owner >= 0 and not one.copy}
    missing = sorted({rank % layout.ranks for rank in range(ranks)} - set(own))
    if missing:
        return f"what was rank {', '.join(map(str, missing[:5]))}'s own is lost"
    if layout.shared_bytes:
        lost = frozenset(range(layout.owners)) - set(shards)
        if recipe(make_code(layout.scheme, layout.owners), lost) is None:
            return (
                f"the shards of {len(lost)} of {layout.owners} hosts are lost: too many for {layout.scheme}"
            )
    return Restorable(key=key, layout=layout, own=own, shards=shards)


def _common(layout: Layout) -> tuple[int, int, str, int]:
    return layout.ranks, layout.shared_bytes, layout.scheme, layout.owners


class KeeperError(SnapshotError):
    """It is not there, or could not do what it was asked."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Keeper:
    """:param path: of its socket; ``$FTD_KEEPER``, else where a keeper of this user has it by default."""

    def __init__(self, path: str | Path | None, default: Path) -> None:
        self.path = Path(path or os.environ.get(SOCKET_VARIABLE) or default / SOCKET)

    def facts(self) -> Facts:
        return self._ask("GET", "/v1/facts", None, Facts)

    def held(self, job: str) -> tuple[Held, ...]:
        return self._ask("GET", f"/v1/held/{job}", None, tuple[Held, ...])

    def begin(self, run: Run) -> None:
        self._ask("POST", "/v1/begin", run, dict[str, str])

    def bring(self, wanted: Wanted) -> Brought:
        return self._ask("POST", "/v1/bring", wanted, Brought, timeout_s=BRING_S)

    def remove(self, job: str) -> None:
        self._ask("POST", f"/v1/remove/{job}", None, dict[str, str])

    def _ask(self, method: str, path: str, body: Any, kind: type[T], *, timeout_s: float = ASK_S) -> T:
        """:raises KeeperError: it is not there, or could not do it."""
        connection = _UnixConnection(self.path, timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body))
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise KeeperError(f"no keeper answers at {self.path}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise KeeperError(data.decode(errors="replace")[:500] or f"the keeper answered {response.status}")
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise KeeperError(f"the keeper at {self.path} is of another version: {error}") from None


class _Presence(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself when all meet."""

    here: int
    newest: int
    shared: str
    """Digest of what it takes for the same on all ranks; empty: nothing is."""
    facts: Facts | None
    alone: tuple[Held, ...]
    held: tuple[Held, ...]


@dataclass(slots=True)
class Protection:
    job: str
    scheme: str
    keeper: Keeper | None
    facts: Facts | None
    active: bool = False
    """All ranks have keepers, and there is another host: what is said below is so."""
    owners: int = 1
    owner: int = -1
    """Which shard of what is shared this rank keeps; -1: another rank of its host does so."""
    shares: bool = False
    generation: int = 0
    same_host: list[int] = field(default_factory=list)
    """Other ranks that see the same memory."""
    _run: Run | None = None

    @classmethod
    def open(cls, job: str, protection: str, path: str | Path | None, default: Path) -> "Protection":
        """:raises SnapshotError: no such protection."""
        if not isinstance(protection, str):
            raise SnapshotError(f"protection: {protection!r} is no text: write 'buddy', say, or 'none'")
        try:
            scheme = code_of(protection)
            losses_of(scheme)
        except ValueError as error:
            raise SnapshotError(f"protection: {error}, and buddy, which is arc:1") from None
        if losses_of(scheme) == 0:
            return cls(job, scheme, None, None)
        keeper = Keeper(path, default)
        try:
            return cls(job, scheme, keeper, keeper.facts())
        except KeeperError as error:
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
    def asked(self) -> bool:
        return losses_of(self.scheme) > 0

    def layout(self, rank: int, ranks: int, own_bytes: int, shared_bytes: int) -> Layout:
        shared = bool(shared_bytes)
        return Layout(
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

    def meet(
        self, ranks: Ranks, directory: Path, own: Mapping[Key, Layout], newest: int, shared: str
    ) -> list[Restorable]:
        """The snapshots that all ranks can have, the newest first; and a generation for this run.

        :param newest: generation of what lies here. :param shared: see ``_Presence``.
        """
        held: tuple[Held, ...] = ()
        if self.keeper is not None:
            try:
                held = self.keeper.held(self.job)
            except KeeperError as error:
                log.warning("%s: not protected: %s", self.job, error)
                self.keeper = self.facts = None
        alone = tuple(Held(address="", generation=g, step=s, layout=one) for (g, s), one in own.items())
        mine = _Presence(
            here=place_number(directory),
            # Runs of a job that was removed in between are told apart by the time.
            newest=max([newest, time.time_ns() // 1_000_000, *(one.generation for one in held)]),
            shared=shared,
            facts=self.facts,
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
            kept = list({(one.key, one.address, one.layout.rank, one.copy): one for one in kept}.values())
        found, refused = restorable(kept, ranks.count)
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
            if self.asked and present and ranks.rank == 0:
                without = [rank for rank, one in enumerate(facts) if one is None]
                log.warning("%s: not protected: no keeper at rank %s", self.job, without[0])
            return
        hosts = tuple(dict.fromkeys(one.address for one in present))
        losses, places = losses_of(self.scheme), [hosts.index(one.address) for one in present]
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
        self._run = Run(
            job=self.job,
            generation=self.generation,
            hosts=hosts,
            ranks=tuple(places),
            spare=spare,
            copies=copies,
        )

    def begin(self, restored: Key | None) -> None:
        """Have the keepers protect this run's snapshots."""
        if self.keeper is not None and self._run is not None and self.active:
            try:
                self.keeper.begin(msgspec.structs.replace(self._run, restored=restored))
            except KeeperError as error:
                log.warning("%s: not protected: %s", self.job, error)

    # --- what is on other hosts ------------------------------------------------------------------

    def bring(self, found: Restorable, rank: int, *, own: bool) -> tuple[Bytes, Bytes]:
        """(the rank's own image with its header behind it, the shared image); empty where not wanted.

        :raises KeeperError: it cannot be had.
        """
        if self.keeper is None or not self.active:
            raise KeeperError("parts of it are on other hosts, and there is no keeper to ask")
        source = found.source_of(rank)
        shared = bool(found.layout.shared_bytes)
        if not own and not shared:
            return NOTHING, NOTHING
        generation, step = found.key
        brought = self.keeper.bring(
            Wanted(
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
                mapped(brought.own) if brought.own else NOTHING,
                mapped(brought.shared) if brought.shared else NOTHING,
            )
        except OSError as error:
            raise KeeperError(f"what the keeper brought is gone: {error}") from None

    def remove(self) -> None:
        """The job is over: copies go, too."""
        if self.keeper is not None:
            try:
                self.keeper.remove(self.job)
            except KeeperError as error:
                log.warning("%s: copies on other hosts may stay: %s", self.job, error)


def layout_of(manifest: Manifest) -> Layout | None:
    """``None``: it was not written by a Snapshotter of this version."""
    try:
        return msgspec.convert(manifest.layout, Layout)
    except msgspec.ValidationError:
        return None
