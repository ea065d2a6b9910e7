"""Snapshots under ZeRO-1 as trainers write them: whole layers out of all parts, tied weights included."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kept_snapshots import TOKEN, Node, flip, shared_directory

from ftd.node.restoring.restore import RestoreError, Restorer
from ftd.node.restoring.staging import OneByOne
from ftd.node.shards.arenas import Arenas, Held
from ftd.node.shards.client import ShardClient
from ftd.node.snapshots.scrub import Scrubber
from statemachine.values import Restore, SnapshotGroup
from storage.layerstate import decode_header
from storage.manifest import Part
from storage.shards import Bytes
from tests.runtime.support import gpt_data
from tests.runtime.test_snapshot_bytes import UNEQUAL, run

JOB, STEP, SCHEME = "job", 2, "arc:1+aor"
NAMES = tuple(f"node-{rank}" for rank in range(5))
GROUPS = tuple(
    SnapshotGroup(
        first_layer=first, end_layer=end, owners=tuple(f"node-{rank}" for rank in owners), protection=SCHEME
    )
    for first, end, owners in ((0, 1, (0, 2, 4)), (1, 2, (0, 3, 4)), (2, 4, (1, 3, 4)))
)
Layers = dict[int, tuple[bytes, Bytes]]


async def restored(root: Path, told: list[tuple[str, str, str]], without: tuple[str, ...] = ()) -> Layers:
    """On node-0, which has what it had unless it is in ``without``, out of the others' memory."""
    async with AsyncExitStack() as stack:
        sources = {}
        for name in set(NAMES) - {"node-0", *without}:
            sources[name] = (await stack.enter_async_context(Node(name, root / name))).address
        found: Layers = {}

        async def put(layer: int, header: bytes, payload: Bytes) -> None:
            found[layer] = header, payload.copy()

        await Restorer(
            restore=Restore(job_id=JOB, step=STEP, generation=1, groups=GROUPS, sources=sources),
            node="newcomer" if "node-0" in without else "node-0",
            arenas=Arenas(root / ("newcomer" if "node-0" in without else "node-0"), devices=1),
            client=await stack.enter_async_context(ShardClient(TOKEN, stall_s=30.0)),
            tell=lambda *said: told.append(said),
        ).run(range(4), OneByOne(put))
        return found


def numbers(layer: int, header: bytes, payload: Bytes) -> dict[tuple[str, str], list[float]]:
    """By tensor and key of the optimizer's state."""
    data = payload.tobytes()
    return {
        (entry.name, entry.key): np.frombuffer(
            data[entry.offset : entry.offset + entry.size_bytes], dtype=entry.dtype
        ).tolist()
        for entry in decode_header(header, layer, len(data)).entries
    }


async def repaired_from_a_replica(root: Path) -> None:
    """A bit of node-2's own part changes: node-0, which protects it, has the same bytes."""

    def stored() -> list[bytes]:
        return [path.read_bytes() for path in sorted((root / "node-2" / JOB / "device-0").glob("slot-*"))]

    before = stored()
    flip(root / "node-2", STEP, "group-0/shard", job=JOB)
    assert stored() != before
    told: list[tuple[str, dict[str, Any]]] = []
    async with Node("node-0", root / "node-0") as protector, Node("node-2", root / "node-2") as node:

        async def mend(held: Held, part: Part, number: int, data: bytes) -> None:
            node.arenas.write(held, part, part.block(number)[0], data)

        sources = {"node-0": protector.address}
        scrubber = Scrubber(
            node="node-2",
            arenas=node.arenas,
            token=TOKEN,
            tls=None,
            rate_bytes_s=1e12,
            period_s=60.0,
            mend=mend,
            say=lambda name, _reason, details: told.append((name, details)),
            spoiled=lambda step: told.append(("spoiled", {"step": step})),
        )
        scrubber.watch(Restore(job_id=JOB, step=STEP, generation=1, groups=GROUPS, sources=sources))
        async with asyncio.timeout(60):
            while len(told) < 2:  # noqa: ASYNC110  # the scrubber is a task of its own
                await asyncio.sleep(0.01)
        await scrubber.close()
    assert [name for name, _ in told] == ["ShardDamaged", "ShardRepaired"], told
    assert told[1][1]["sources"] == ["node-0"] and stored() == before


def test_tied_layers_are_whole_after_each_loss_and_as_without_zero1(tmp_path: Path) -> None:
    data = gpt_data(steps=10)
    expected = {}
    for rank in run(data, UNEQUAL, "none", tmp_path):
        for layer, (header, payload) in rank.packed.items():
            expected[layer] = numbers(layer, header, np.frombuffer(payload, dtype=np.uint8))
    tied = [key for key in expected[3] if key in expected[0]]
    assert {key for _, key in tied} == {"", "exp_avg", "exp_avg_sq", "step"}

    with shared_directory() as root:
        sharded = msgspec.structs.replace(data, zero1=True)
        run(sharded, UNEQUAL, SCHEME, root, place=lambda rank: f"node-{rank}/{JOB}/device-0")
        told: list[tuple[str, str, str]] = []
        for lost in [(), *((name,) for name in NAMES)]:
            layers = asyncio.run(restored(root, told, lost))
            for layer, (header, payload) in layers.items():
                found = numbers(layer, header, payload)
                assert set(found) == set(expected[layer]), (lost, layer)
                for key, values in found.items():
                    assert values == pytest.approx(expected[layer][key], rel=1e-9, abs=1e-12), (lost, key)
        assert told == []
        asyncio.run(repaired_from_a_replica(root))

        # Of the first of the tied layers a part is nowhere, neither with its owner nor with its protector.
        with pytest.raises(RestoreError, match=r"layers 0 to 0: nobody .* of layer 0 \(node-2\)"):
            asyncio.run(restored(root, told, ("node-0", "node-2")))
