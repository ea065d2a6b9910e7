"""The client that a snapshot agent uses for other agents: a shard client with four more requests."""

import msgspec

from ftd.errors import PeerError
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.sources import SnapshotSource
from runtime.wire.snapshot_agent_protocol import (
    HeldSnapshots,
    ProtectRequest,
    RankSnapshotLayout,
    SnapshotKey,
)
from storage.manifest import SnapshotManifest

_ASK_S = 5.0


class PeerAgentClient(ShardClient):
    """The client; use it as ``async with PeerAgentClient(token) as client``."""

    async def held(self, address: str, job: str) -> HeldSnapshots:
        """Return what the agent at ``address`` holds of a job.

        :raises PeerError: the agent cannot be reached, or its answer is malformed.
        """
        body = await self.request("GET", address, f"/scripts/held/{job}", b"", _ASK_S)
        try:
            return msgspec.json.decode(body, type=HeldSnapshots)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"{address} sent a malformed list of snapshots: {error}") from None

    async def send(self, address: str, what: str, message: ProtectRequest, timeout_s: float) -> None:
        """Have the agent at ``address`` carry out one phase of the protection of a step.

        :raises PeerError: the agent cannot be reached, or could not do it; the message says why.
        """
        await self.request("POST", address, f"/scripts/{what}", msgspec.json.encode(message), timeout_s)

    async def remove(self, address: str, job: str) -> None:
        """Have the agent at ``address`` remove a job's snapshots.

        :raises PeerError: the agent cannot be reached.
        """
        await self.request("POST", address, f"/scripts/remove/{job}", b"", _ASK_S)

    async def rank_manifest(
        self, source: SnapshotSource, job: str, rank: int, key: SnapshotKey
    ) -> SnapshotManifest | None:
        """Return the manifest of a rank's snapshot, or ``None`` if it is not there (yet).

        :raises PeerError: the agent cannot be reached, or the rank's own bytes are corrupt.
        """
        found = await self.manifest(source, job, key[1])
        for manifest in found.manifests:
            try:
                layout = msgspec.convert(manifest.layout, RankSnapshotLayout)
            except msgspec.ValidationError:
                continue
            if (manifest.generation, manifest.step, layout.rank) == (*key, rank):
                bad = [p.name for p in manifest.parts if p.name in found.corrupt and "/shared-" not in p.name]
                if bad:
                    raise PeerError(f"{source} has a corrupt {bad[0]} of step {key[1]}")
                return manifest
        return None
