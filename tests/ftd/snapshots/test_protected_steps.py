"""The steps of scripts' snapshots that an agent protects, without processes: one agent and rank 0's memory."""

import asyncio
from pathlib import Path

from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.snapshot_agent.agent import ARENA_NAMES, SnapshotAgent
from ftd.snapshots.snapshot_agent.client import PeerAgentClient
from runtime.wire.snapshot_agent_protocol import ProtectedRun, read_retained
from storage.arena import Arena
from storage.manifest import SnapshotManifest, SnapshotPart

ADDRESS = "127.0.0.1:1"
RUN = ProtectedRun(job="job", generation=5, hosts=(ADDRESS,), host_of_rank=(0,), copies=0)


def write_snapshot(directory: Path, step: int) -> None:
    """Write a snapshot of this step as a rank does."""
    arena = Arena.open(directory)
    slot = arena.begin(4)
    slot.view[:] = step
    part = SnapshotPart.from_bytes("rank-0/own-00000", 0, slot.view[:4])
    arena.commit(
        SnapshotManifest(
            job_id="job", step=step, generation=RUN.generation, slot=slot.number, parts=(part,), layout={}
        )
    )
    arena.close()


def test_a_snapshot_of_the_state_before_the_first_step_is_protected(tmp_path: Path) -> None:
    asyncio.run(protect(tmp_path, (0, 1)))


async def protect(root: Path, steps: tuple[int, ...]) -> None:
    """Write snapshots of these steps, each once the one before is protected, and wait for the last."""
    rank = root / "job" / "rank-0"
    rank.mkdir(parents=True)
    arenas = NodeArenas(root, devices=1, names=(ARENA_NAMES,))
    async with PeerAgentClient("token") as client, asyncio.timeout(5):
        agent = SnapshotAgent(arenas, client, address=ADDRESS, peers=(), rate_bytes_s=None)
        agent.begin(RUN)
        try:
            for step in steps:
                write_snapshot(rank, step)
                while read_retained(root / "job").common != (RUN.generation, step):  # noqa: ASYNC110  # a file
                    await asyncio.sleep(0.01)
        finally:
            await agent.close()
