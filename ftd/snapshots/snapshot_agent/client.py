"""What a keeper asks other keepers: a shard client with four more requests."""

import msgspec

from ftd.errors import PeerError
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.sources import SnapshotSource
from runtime.wire.snapshot_agent_protocol import (
    HeldRankSnapshot,
    ProtectRequest,
    RankSnapshotLayout,
    SnapshotKey,
)
from storage.manifest import SnapshotManifest

_ASK_S = 5.0


class PeerAgentClient(ShardClient):
    """``async with PeerAgentClient(token) as client``."""

    async def held(self, address: str, job: str) -> list[HeldRankSnapshot]:
        """:raises PeerError: it cannot be reached, or does not answer as it should."""
        body = await self.ask("GET", address, f"/scripts/held/{job}", b"", _ASK_S)
        try:
            return msgspec.json.decode(body, type=list[HeldRankSnapshot])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"{address} sent what is no list of snapshots: {error}") from None

    async def send(self, address: str, what: str, message: ProtectRequest, timeout_s: float) -> None:
        """:raises PeerError: it cannot be reached, or cannot do it; says why."""
        await self.ask("POST", address, f"/scripts/{what}", msgspec.json.encode(message), timeout_s)

    async def remove(self, address: str, job: str) -> None:
        """:raises PeerError: it cannot be reached."""
        await self.ask("POST", address, f"/scripts/remove/{job}", b"", _ASK_S)

    async def rank_manifest(
        self, source: SnapshotSource, job: str, rank: int, key: SnapshotKey
    ) -> SnapshotManifest | None:
        """Of a rank's snapshot, its own part; ``None``: it is not there (yet).

        :raises PeerError: it cannot be reached, or its bytes are damaged.
        """
        found = await self.manifest(source, job, key[1])
        if found is None:
            return None
        for manifest in found.manifests:
            try:
                layout = msgspec.convert(manifest.layout, RankSnapshotLayout)
            except msgspec.ValidationError:
                continue
            if (manifest.generation, manifest.step, layout.rank) == (*key, rank):
                bad = [p.name for p in manifest.parts if p.name in found.corrupt and "/shared-" not in p.name]
                if bad:
                    raise PeerError(f"{source} has a damaged {bad[0]} of step {key[1]}")
                return manifest
        return None
