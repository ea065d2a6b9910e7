"""Protection of a script's snapshots among its ranks' hosts: who they are, what each keeps, what is left.

What is the same on all ranks (DDP) is kept by the hosts together: each its segment and its parity, made from
its own memory without network traffic. What is a rank's own is copied to buddy hosts by their keepers. Both
withstand the same losses. Without a keeper on each host everything stays as it is without protection.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from runtime.script.catalogue import Restorable, code_of, losses_of, restorable
from runtime.script.keeper import Keeper, KeeperError
from runtime.script.plain_state import SnapshotError
from runtime.script.ranks import Ranks, place_number
from runtime.script.saved import NOTHING, mapped
from runtime.script.tensor_image import Bytes
from runtime.wire.keeper_protocol import Facts, Held, Key, Layout, Run, Wanted
from storage.codes import make_code
from storage.manifest import Manifest
from storage.shards import ShardLayout

log = logging.getLogger("ftd.snapshotter")


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
