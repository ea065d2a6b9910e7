"""The test of the links to other nodes: short transfers from their snapshot servers."""

import asyncio
import ssl
import time
from collections.abc import Sequence

import aiohttp
import structlog

from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.protocol import LINK_TEST_BYTES
from ftd.snapshots.shards.sources import SnapshotSource
from statemachine.messages.values import LinkHealth, ReplicaPeer

log = structlog.get_logger("ftd.node")

_LIMIT_S = 2.0
"""Time limit of the test of one link."""
_ROUND_TRIPS = 3
_TRANSFERS = 2
"""Requests of each size, of which the quickest counts."""


async def check_links(
    peers: Sequence[ReplicaPeer], token: str, tls: ssl.SSLContext | None
) -> tuple[LinkHealth, ...]:
    """Test the links one after the other, and return those whose peers answered in time."""
    found: list[LinkHealth] = []
    async with ShardClient(token, stall_s=_LIMIT_S, tls=tls) as client:
        for peer in peers:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    found.append(await _check_link(client, peer))
            except (aiohttp.ClientError, OSError, ValueError) as error:  # A timeout is an OSError.
                log.warning("link_not_tested", peer=peer.node, reason=str(error) or type(error).__name__)
    return tuple(found)


async def _check_link(client: ShardClient, peer: ReplicaPeer) -> LinkHealth:
    source = SnapshotSource(node=peer.node, address=peer.address)
    await _read(client, source, 1)  # It opens the connection.
    latency_s = min([await _read(client, source, 1) for _ in range(_ROUND_TRIPS)])
    transfer_s = min([await _read(client, source, LINK_TEST_BYTES) for _ in range(_TRANSFERS)])
    return LinkHealth(
        node=peer.node,
        latency_ms=round(1e3 * latency_s, 3),
        mb_s=round(LINK_TEST_BYTES / max(transfer_s, 1e-9) / 1e6, 1),
    )


async def _read(client: ShardClient, source: SnapshotSource, size_bytes: int) -> float:
    """Read this many bytes, and return how long it took, in seconds.

    :raises ValueError: the answer is not what was requested.
    """
    started = time.perf_counter()
    async with client.session.get(client.url(source, f"/link/{size_bytes}")) as response:
        if response.status != 200:
            raise ValueError(f"{source} answered with status {response.status}")
        received = 0
        async for block in response.content.iter_any():
            received += len(block)
            if received > size_bytes:
                break
    if received != size_bytes:
        raise ValueError(f"{source} sent another number of bytes than {size_bytes}")
    return time.perf_counter() - started
