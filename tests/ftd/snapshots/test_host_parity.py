"""Parity of ranks' own images among hosts: real agents and servers in one process, without scripts.

Hosts are lost before, while and after the parity of a step is computed. What is left decides which step is
the newest that all ranks can restore, and each image of that step must come back byte for byte.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import PeerError
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.server import ShardServer
from ftd.snapshots.snapshot_agent.agent import ARENA_NAMES, SnapshotAgent
from ftd.snapshots.snapshot_agent.client import PeerAgentClient
from ftd.snapshots.snapshot_agent.fetcher import SnapshotFetcher, _map_draft
from runtime.script.protection import RestorableSnapshot, find_restorable
from runtime.wire.snapshot_agent_protocol import (
    FetchRequest,
    HeldSnapshots,
    ProtectedRun,
    ProtectRequest,
    RankSnapshotLayout,
    parity_groups,
)
from storage.arena import Arena
from storage.codes import make_code
from storage.manifest import SnapshotManifest, SnapshotPart, digest_of
from tests.helpers.kept_snapshots import TOKEN

JOB = "job"
RANKS_OF_A_HOST = 2


class AgentHost(AbstractAsyncContextManager["AgentHost"]):
    """A host with its agent, whose memory is a directory."""

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root
        self.arenas = NodeArenas(root, devices=1, limit_bytes=limit_bytes, names=(ARENA_NAMES,))
        self.server = ShardServer(self.arenas, TOKEN)

    async def __aenter__(self) -> "AgentHost":
        self.arenas.open()
        await self.server.start()
        self.client = await PeerAgentClient(TOKEN).__aenter__()
        self.address = f"127.0.0.1:{self.server.port}"
        self.agent = SnapshotAgent(
            self.arenas, self.client, address=self.address, peers=(), rate_bytes_s=None
        )
        self.fetcher = SnapshotFetcher(self.arenas, self.client, address=self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.agent.close()
        await self.client.__aexit__(None, None, None)
        await self.server.close()
        self.arenas.close()

    async def lose(self) -> None:
        await self.server.close()
        shutil.rmtree(self.root / JOB)

    @property
    def parity_bytes(self) -> int:
        """Bytes of one step's parity."""
        return max(path.stat().st_size for path in self.root.glob(f"{JOB}/parity-*/slot-*"))


def image_of(rank: int, step: int) -> bytes:
    """Return a rank's image and header; sizes differ between ranks and steps."""
    size = (3 + rank % 3) * 1_300_000 + 1000 * step + rank
    return np.random.default_rng((rank, step)).integers(0, 256, size, dtype=np.uint8).tobytes()


def write_rank(root: Path, rank: int, ranks: int, step: int) -> None:
    """Write a snapshot as a script's rank does, in parts of 1.5 MB and after bytes that are shared."""
    arena = Arena.open(root / JOB / f"rank-{rank}")
    data = b"shared" * 100 + image_of(rank, step)
    slot = arena.begin(len(data))
    slot.view[:] = np.frombuffer(data, dtype=np.uint8)
    ends = [*range(600, len(data) - 500, 1_500_000), len(data) - 500, len(data)]
    names = ["shared-00000", *(f"own-{n:05d}" for n in range(len(ends) - 2)), "header"]
    starts = [0, *ends[:-1]]
    parts = tuple(
        SnapshotPart(
            name=f"rank-{rank}/{name}",
            offset=start,
            size_bytes=end - start,
            digest=digest_of(data[start:end]),
        )
        for name, start, end in zip(names, starts, ends, strict=True)
    )
    layout = RankSnapshotLayout(rank=rank, ranks=ranks, own_bytes=len(data) - 1100)
    arena.commit(
        SnapshotManifest(
            job_id=JOB,
            step=step,
            generation=1,
            slot=slot.number,
            parts=parts,
            layout=msgspec.to_builtins(layout),
        )
    )
    arena.close()


class ParityCluster:
    """Hosts with ranks whose images differ."""

    def __init__(self, hosts: Sequence[AgentHost], scheme: str) -> None:
        self.hosts = hosts
        self.ranks = RANKS_OF_A_HOST * len(hosts)
        self.run = ProtectedRun(
            job=JOB,
            generation=1,
            hosts=tuple(host.address for host in hosts),
            host_of_rank=tuple(rank // RANKS_OF_A_HOST for rank in range(self.ranks)),
            copies=0,
            parity=scheme,
        )

    def complete(self, step: int) -> ProtectRequest:
        for rank in range(self.ranks):
            write_rank(self.hosts[rank // RANKS_OF_A_HOST].root, rank, self.ranks, step)
        return ProtectRequest(run=self.run, step=step)

    async def protect(self, step: int) -> None:
        message = self.complete(step)
        for host in self.hosts:
            await host.agent.pin(message)
        await asyncio.gather(*(host.agent.copy(message) for host in self.hosts))
        for host in self.hosts:
            await host.agent.release(message)

    def restorable(self, left: Sequence[AgentHost]) -> list[RestorableSnapshot]:
        held = HeldSnapshots()
        for host in left:
            held = held + host.agent.held(JOB)
        return find_restorable(held.ranks, self.ranks, held.parity)[0]

    async def fetched(self, found: RestorableSnapshot, host: AgentHost, rank: int) -> bytes:
        result = await host.fetcher.fetch(
            FetchRequest(
                job=JOB,
                generation=1,
                step=found.key[1],
                rank=rank,
                own=found.own.get(rank, ()),
                decode=found.decode.get(rank),
                layout=found.layout,
            )
        )
        return Path(result.own).read_bytes()


@pytest.mark.parametrize(
    ("scheme", "lost", "encoded", "newest"),
    [
        ("aec", [1], [], 3),  # before any host has parity of step 4
        ("aec", [1], [0, 2], 3),  # while hosts compute it: host 3 has none
        ("aec", [3], [0, 1, 2], 4),  # the only host without it is lost
        ("aec", [0], [0, 1, 2, 3], 4),  # after all have it, and before any host knows
        ("aec2", [0, 2], [0, 1, 2, 3], 4),
        ("aec", [0, 2], [0, 1, 2, 3], None),
    ],
)
def test_the_newest_step_that_is_complete_survives_lost_hosts(
    tmp_path: Path, scheme: str, lost: list[int], encoded: list[int], newest: int | None
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            hosts = [await stack.enter_async_context(AgentHost(tmp_path / f"h{n}")) for n in range(4)]
            cluster = ParityCluster(hosts, scheme)
            await cluster.protect(3)
            message = cluster.complete(4)
            for host in hosts:
                await host.agent.pin(message)
            for number in encoded:
                await hosts[number].agent.copy(message)
            for number in lost:
                await hosts[number].lose()
            left = [host for number, host in enumerate(hosts) if number not in lost]
            found = cluster.restorable(left)
            assert [one.key[1] for one in found[:1]] == ([] if newest is None else [newest])
            for one in found[:1]:
                for rank in range(cluster.ranks):
                    data = await cluster.fetched(one, left[rank % len(left)], rank)
                    assert data == image_of(rank, one.key[1]), f"rank {rank}"

    asyncio.run(main())


def test_corrupt_bytes_of_another_host_are_noticed_and_decoded(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            hosts = [await stack.enter_async_context(AgentHost(tmp_path / f"h{n}")) for n in range(4)]
            cluster = ParityCluster(hosts, "aec")
            await cluster.protect(3)
            flip(hosts[1].root / JOB / "rank-2")
            (found,) = cluster.restorable(hosts)
            assert await cluster.fetched(found, hosts[0], 2) == image_of(2, 3)
            flip(hosts[2].root / JOB / "parity-2")
            shutil.rmtree(hosts[0].root / JOB / "fetched-1-3")
            with pytest.raises(PeerError, match="2 of 4 hosts are lost or corrupt, too many for aec"):
                await cluster.fetched(found, hosts[0], 2)
            # A host whose image is corrupt cannot be protected by parity of it.
            flip(hosts[1].root / JOB / "rank-2")
            message = cluster.complete(4)
            flip(hosts[1].root / JOB / "rank-2", slot=1)
            with pytest.raises(PeerError, match="has a corrupt rank-2/own"):
                await hosts[0].agent.copy(message)

    asyncio.run(main())


def flip(directory: Path, slot: int = 0) -> None:
    with (directory / f"slot-{slot}").open("r+b") as file:
        file.seek(700_000)
        byte = file.read(1)[0]
        file.seek(700_000)
        file.write(bytes([byte ^ 16]))


def test_parity_among_four_hosts_takes_a_third_of_the_largest_images(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            hosts = [await stack.enter_async_context(AgentHost(tmp_path / f"h{n}")) for n in range(4)]
            cluster = ParityCluster(hosts, "aec")
            await cluster.protect(3)
            images = [sum(len(image_of(2 * n + k, 3)) for k in range(2)) for n in range(4)]
            for host in hosts:
                assert max(images) / 3 <= host.parity_bytes <= max(images) / 3 + 3 * 4096
            for step in range(4, 8):
                await cluster.protect(step)
                for host in hosts:  # as ranks do
                    for rank in range(cluster.ranks):
                        if (path := host.root / JOB / f"rank-{rank}").exists():
                            arena = Arena.open(path)
                            arena.release([step - 1])
                            arena.close()
            # One step that is protected, and one that is being protected.
            assert len([path for host in hosts for path in host.root.glob(f"{JOB}/parity-*/slot-*")]) == 2 * 4

    asyncio.run(main())


@pytest.mark.parametrize(("scheme", "copies"), [("aec", 0), ("", 1)])
def test_copies_and_parity_respect_the_limit_of_a_host(tmp_path: Path, scheme: str, copies: int) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            limits = [None, 12 << 20, None, None]  # Two ranks of a host have 8 to 12 MB together.
            hosts = [
                await stack.enter_async_context(AgentHost(tmp_path / f"h{n}", limit))
                for n, limit in enumerate(limits)
            ]
            cluster = ParityCluster(hosts, scheme)
            cluster.run = msgspec.structs.replace(cluster.run, copies=copies)
            message = cluster.complete(3)
            for host in hosts:
                await host.agent.pin(message)
            with pytest.raises(
                PeerError, match=rf"{hosts[1].address} cannot protect step 3: .* limit of \d+ bytes"
            ):
                await hosts[1].agent.copy(message)
            await hosts[2].agent.copy(message)

    asyncio.run(main())


@given(st.integers(1, 200), st.sampled_from(["aec", "aec2"]))
def test_groups_are_large_enough_for_their_code(hosts: int, scheme: str) -> None:
    groups = parity_groups(hosts)
    assert [host for group in groups for host in group] == list(range(hosts))
    if hosts >= 4:
        assert all(
            make_code(scheme, len(group)).guarantee == (1 if scheme == "aec" else 2) for group in groups
        )


def test_another_attempt_leaves_the_memory_of_a_failed_one_in_place(tmp_path: Path) -> None:
    """A thread may still read it, and would end the process with SIGBUS if pages of it were gone."""
    first = _map_draft(tmp_path / "draft", 3 * 1024 * 1024)
    first[:] = 7
    second = _map_draft(tmp_path / "draft", 3 * 1024 * 1024)
    assert second.all() and first.all()
    second[:] = 9
    assert (first == 9).all()  # Memory for one image is enough.
    with (tmp_path / "draft").open("rb") as longer:
        assert len(_map_draft(tmp_path / "draft", 1000)) == (tmp_path / "draft").stat().st_size == 1000
        assert os.fstat(longer.fileno()).st_size == len(first), "a shorter draft is another file"
