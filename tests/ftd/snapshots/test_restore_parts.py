"""Snapshots under ZeRO-1 as trainers write them: whole layers from all parts, including tied weights."""

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack
from itertools import permutations
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from ftd.snapshots.restoring.restore import LayerRestoreError, Restorer, RestoreStatistics
from ftd.snapshots.restoring.staging import LayerStream
from ftd.snapshots.scrub import ArenaScrubbing, Scrubber
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from statemachine.messages.trainer import ShardWritten, WorldPipeline
from statemachine.messages.values import Restore, SnapshotGroup
from storage.layerstate import decode_header
from storage.manifest import SnapshotPart
from storage.partimage import PartImage, ShardedImage, assemble_from_parts
from storage.shards import Bytes
from tests.helpers.harness import pipeline
from tests.helpers.kept_snapshots import JOB as KEPT_JOB
from tests.helpers.kept_snapshots import TOKEN, Node, flip, shared_directory, write
from tests.helpers.part_images import layer_of, part_of
from tests.helpers.runtime_support import gpt_data
from tests.helpers.snapshot_runs import SEVERAL, UNEQUAL, run

JOB, STEP, SCHEME = "job", 2, "arc:1+aor"
NAMES = tuple(f"node-{rank}" for rank in range(5))


def groups(*runs: tuple[int, int, tuple[int, ...]]) -> tuple[SnapshotGroup, ...]:
    """Return groups of (first layer, end layer, numbers of the nodes that own them)."""
    return tuple(
        SnapshotGroup(
            first_layer=first,
            end_layer=end,
            owners=tuple(f"node-{rank}" for rank in owners),
            protection=SCHEME,
        )
        for first, end, owners in runs
    )


GROUPS = groups((0, 1, (0, 2, 4)), (1, 2, (0, 3, 4)), (2, 4, (1, 3, 4)))
Layers = dict[int, tuple[bytes, Bytes]]


async def restored(
    root: Path,
    reports: list[tuple[str, str, str]],
    without: tuple[str, ...] = (),
    snapshot: tuple[SnapshotGroup, ...] = GROUPS,
) -> Layers:
    """Restore on node-0 from the others' memory, and from its own unless it is in ``without``."""
    async with AsyncExitStack() as stack:
        sources = {}
        owners = {owner for group in snapshot for owner in group.owners}
        for name in owners - {"node-0", *without}:
            sources[name] = (await stack.enter_async_context(Node(name, root / name))).address
        found: Layers = {}

        async def put(layer: int, header: bytes, payload: Bytes) -> None:
            found[layer] = header, payload.copy()

        await Restorer(
            restore=Restore(job_id=JOB, step=STEP, generation=1, groups=snapshot, sources=sources),
            node="newcomer" if "node-0" in without else "node-0",
            arenas=NodeArenas(root / ("newcomer" if "node-0" in without else "node-0"), devices=1),
            client=await stack.enter_async_context(ShardClient(TOKEN, stall_s=30.0)),
            report_corruption=lambda *report: reports.append(report),
        ).run(range(4), LayerStream(put))
        return found


def numbers(layer: int, header: bytes, payload: Bytes) -> dict[tuple[str, str], list[float]]:
    """Return the values by tensor and key of the optimizer's state."""
    data = payload.tobytes()
    return {
        (entry.name, entry.key): np.frombuffer(
            data[entry.offset : entry.offset + entry.size_bytes], dtype=entry.dtype
        ).tolist()
        for entry in decode_header(header, layer, len(data)).entries
    }


async def repaired(
    root: Path,
    snapshot: tuple[SnapshotGroup, ...],
    job: str,
    *,
    owner: str,
    part: str,
    device: int = 0,
    others: Collection[str],
) -> list[str]:
    """Flip a bit of a part of ``owner``, repair it, and return the sources.

    :param others: nodes that are present.
    """

    def stored() -> list[bytes]:
        return [
            path.read_bytes() for path in sorted((root / owner / job / f"device-{device}").glob("slot-*"))
        ]

    before = stored()
    flip(root / owner, STEP, part, device=device, job=job)
    assert stored() != before
    reports: list[tuple[str, dict[str, Any]]] = []
    async with AsyncExitStack() as stack:
        sources = {}
        for name in others:
            sources[name] = (await stack.enter_async_context(Node(name, root / name))).address
        node = await stack.enter_async_context(Node(owner, root / owner))

        async def repair(held: ArenaSnapshot, part: SnapshotPart, number: int, data: bytes) -> None:
            node.arenas.write(held, part, part.block(number)[0], data)

        scrubber = Scrubber(
            node=owner,
            operations=ArenaScrubbing(
                node=owner, arenas=node.arenas, token=TOKEN, tls=None, write_block=repair
            ),
            rate_bytes_s=1e12,
            period_s=60.0,
            publish_event=lambda name, _reason, details: reports.append((name, details)),
            on_repaired=lambda step: reports.append(("repaired", {"step": step})),
            on_unrepairable=lambda step: reports.append(("unrepairable", {"step": step})),
        )
        scrubber.start(Restore(job_id=job, step=STEP, generation=1, groups=snapshot, sources=sources))
        async with asyncio.timeout(60):
            while len(reports) < 3:  # noqa: ASYNC110  # the scrubber is a task of its own
                await asyncio.sleep(0.01)
        await scrubber.close()
    assert [name for name, _ in reports] == ["ShardCorrupted", "ShardRepaired", "repaired"], reports
    assert stored() == before
    found: list[str] = reports[1][1]["sources"]
    return found


# --- owners with different cuts --------------------------------------------------------------------

COUNTS = [40, 7, 1]
"""Number of elements of each parameter of layer 7."""
DEVICES = {"one": 1, "two": 2, "four": 4}
"""Number of devices of each owner; the devices hold shards."""
MIXED = SnapshotGroup(first_layer=7, end_layer=8, owners=tuple(DEVICES), protection="none", whole=True)


def write_shards(root: Path, owner: int, device: int, devices: int) -> None:
    """Write what a device of a stage with shards writes."""
    part, data = part_of(COUNTS, device, device + 1, devices)
    held = PartImage(
        start=device,
        end=device + 1,
        of=devices,
        replica=False,
        offset=0,
        size_bytes=len(data),
        layers=(part,),
    )
    small = ShardedImage(layers=(layer_of(COUNTS),), held=(held,)).to_bytes()
    described = {
        "first_layer": 7,
        "end_layer": 8,
        "owners": list(DEVICES),
        "owner": owner,
        "scheme": "none",
        "bucket_bytes": len(data),
        "parted": True,
        "device": device,
    }
    name = f"group-7.{device}" if device else "group-7"
    write(
        root,
        STEP,
        {f"{name}/shard": data, f"{name}/small": np.frombuffer(small, dtype=np.uint8)},
        layout={"groups": [described], "vote": None},
        device=device,
    )


def restore_layer(
    root: Path,
    reports: list[tuple[str, str, str]],
    here: str,
    *,
    gone: Collection[tuple[str, int]] = (),
    flipped: Collection[tuple[str, int]] = (),
) -> tuple[RestoreStatistics, bytes, bytes]:
    """Restore layer 7 on node ``here``.

    :param gone: devices of nodes whose arenas are lost.
    """
    for number, (name, devices) in enumerate(DEVICES.items()):
        rmtree(root / name, ignore_errors=True)
        for device in set(range(devices)) - {device for node, device in gone if node == name}:
            write_shards(root / name, number, device, devices)
    for name, device in flipped:
        part = f"group-7.{device}/shard" if device else "group-7/shard"
        flip(root / name, STEP, part, device=device)

    async def work() -> tuple[RestoreStatistics, bytes, bytes]:
        async with AsyncExitStack() as stack:
            sources = {}
            for name in set(DEVICES) - {here}:
                sources[name] = (await stack.enter_async_context(Node(name, root / name))).address
            found: list[tuple[bytes, bytes]] = []

            async def put(layer: int, header: bytes, payload: Bytes) -> None:
                found.append((header, payload.tobytes()))

            restored = await Restorer(
                restore=Restore(job_id=KEPT_JOB, step=STEP, generation=1, groups=(MIXED,), sources=sources),
                node=here,
                arenas=NodeArenas(root / here, devices=4),
                client=await stack.enter_async_context(ShardClient(TOKEN, stall_s=30.0)),
                report_corruption=lambda *report: reports.append(report),
            ).run([7], LayerStream(put))
            return restored, *found[0]

    return asyncio.run(work())


def test_any_ranges_that_cover_a_layer_make_it() -> None:
    """Own memory is read first; what is lost there or on another node is read elsewhere, however it is cut
    there.
    """
    header, payload = assemble_from_parts(layer_of(COUNTS), [part_of(COUNTS, 0, 1, 1)])
    expected = [header, payload.tobytes()]
    arenas = {(name, device) for name, devices in DEVICES.items() for device in range(devices)}
    reports: list[tuple[str, str, str]] = []
    with shared_directory() as root:
        for here in ("newcomer", *DEVICES):
            restored, *made = restore_layer(root, reports, here)
            assert made == expected
            assert (restored.fetched_bytes == 0) == (here in DEVICES)
        for left in DEVICES:
            gone = {one for one in arenas if one[0] != left}
            _, *made = restore_layer(root, reports, "newcomer", gone=gone)
            assert made == expected
        # No node has all of its devices left.
        _, *made = restore_layer(root, reports, "four", gone={("one", 0), ("two", 0), ("four", 2)})
        assert made == expected
        gone = {("one", 0), ("two", 1), ("four", 0), ("four", 1)}
        _, *made = restore_layer(root, reports, "two", gone=gone)
        assert made == expected
        assert reports == []
        with pytest.raises(LayerRestoreError, match=r"the part from 1/2 to 3/4 of layer 7 \(missing: one\)"):
            restore_layer(root, reports, "newcomer", gone={("one", 0), ("two", 1), ("four", 2)})
        # Corrupt bytes count as lost.
        _, *made = restore_layer(root, reports, "two", flipped={("two", 1), ("one", 0)})
        assert made == expected
        assert {report[:2] for report in reports} == {("two", "group-7.1/shard"), ("one", "group-7/shard")}


@pytest.mark.parametrize(("owner", "other"), list(permutations(DEVICES, 2)))
def test_corrupt_bytes_of_a_part_are_repaired_from_the_same_elements_elsewhere(
    owner: str, other: str
) -> None:
    with shared_directory() as root:
        for number, (name, devices) in enumerate(DEVICES.items()):
            for device in range(devices):
                write_shards(root / name, number, device, devices)
        last = DEVICES[owner] - 1
        part = f"group-7.{last}/shard" if last else "group-7/shard"
        made = repaired(root, (MIXED,), KEPT_JOB, owner=owner, part=part, device=last, others=[other])
        assert asyncio.run(made) == [other]


# --- as trainers write them ------------------------------------------------------------------------

Numbers = dict[int, dict[tuple[str, str], list[float]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Return the values of each layer, as without ZeRO-1."""
    return {
        layer: numbers(layer, header, np.frombuffer(payload, dtype=np.uint8))
        for rank in run(gpt_data(steps=10), UNEQUAL, "none", tmp_path_factory.mktemp("whole"))
        for layer, (header, payload) in rank.packed.items()
    }


def check(layers: Layers, expected: Numbers, lost: tuple[str, ...]) -> None:
    assert set(layers) == set(expected)
    for layer, (header, payload) in layers.items():
        found = numbers(layer, header, payload)
        assert set(found) == set(expected[layer]), (lost, layer)
        for key, values in found.items():
            assert values == pytest.approx(expected[layer][key], rel=1e-9, abs=1e-12), (lost, key)


def test_the_devices_of_a_node_divide_its_parts(expected: Numbers) -> None:
    """The stages have two devices: each device writes some layers, and the first writes the replicas of all."""
    nodes = ("node-0/{}/device-0", "node-0/{}/device-1", "node-2/{}/device-0")
    places = (*nodes, "node-3/{}/device-0", "node-3/{}/device-1")
    snapshot = groups((0, 3, (0, 3)), (3, 4, (2, 3)))
    with shared_directory() as root:
        sharded = msgspec.structs.replace(gpt_data(steps=10), zero1=True)
        for rank in run(sharded, SEVERAL, SCHEME, root, place=lambda rank: places[rank].format(JOB)):
            (snapped,) = rank.reports
            assert isinstance(snapped, ShardWritten) and snapped.size_bytes > 0
        reports: list[tuple[str, str, str]] = []
        for lost in [(), ("node-0",), ("node-2",), ("node-3",)]:
            check(asyncio.run(restored(root, reports, lost, snapshot)), expected, lost)
        assert reports == []


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.long
def test_devices_that_hold_shards_restore_their_ranges(expected: Numbers, zero1: bool) -> None:
    """One node has halves of layers, another has quarters, and a third has whole layers.

    Without ZeRO-1, any owner of a layer has all of it; with ZeRO-1, its parts and replicas of the next
    owner's.
    """
    halves = sharded(pipeline((0, 3, [0, 1]), (3, 4, [2]), first_microbatch=0, microbatches=2))
    quarters = sharded(pipeline((0, 4, [3, 4, 5, 6]), first_microbatch=2, microbatches=2))
    places = [
        f"node-{node}/{JOB}/device-{device}"
        for node, devices in ((0, 2), (2, 1), (3, 4))
        for device in range(devices)
    ]
    scheme = SCHEME if zero1 else "none"
    snapshot = tuple(
        replace(group, whole=not zero1, protection=scheme) for group in groups((0, 3, (0, 3)), (3, 4, (2, 3)))
    )
    data = msgspec.structs.replace(gpt_data(steps=10), within_node="shard", zero1=zero1)
    losses: list[tuple[str, ...]] = [(), ("node-0",), ("node-3",)]
    with shared_directory() as root:
        for rank in run(data, (halves, quarters), scheme, root, place=lambda rank: places[rank]):
            (snapped,) = rank.reports
            assert isinstance(snapped, ShardWritten) and snapped.size_bytes > 0
        reports: list[tuple[str, str, str]] = []
        for lost in losses if zero1 else [*losses, ("node-0", "node-2")]:
            check(asyncio.run(restored(root, reports, lost, snapshot)), expected, lost)
        assert reports == []


def sharded(one: WorldPipeline) -> WorldPipeline:
    """Return the pipeline with its first stage in shards."""
    first, *others = one.stages
    return msgspec.structs.replace(one, stages=(msgspec.structs.replace(first, within="shard"), *others))


def test_tied_layers_are_whole_after_each_loss_and_as_without_zero1(expected: Numbers) -> None:
    data = gpt_data(steps=10)
    tied = [key for key in expected[3] if key in expected[0]]
    assert {key for _, key in tied} == {"", "exp_avg", "exp_avg_sq", "step"}

    with shared_directory() as root:
        sharded = msgspec.structs.replace(data, zero1=True)
        run(sharded, UNEQUAL, SCHEME, root, place=lambda rank: f"node-{rank}/{JOB}/device-0")
        reports: list[tuple[str, str, str]] = []
        for lost in [(), *((name,) for name in NAMES)]:
            check(asyncio.run(restored(root, reports, lost)), expected, lost)
        assert reports == []
        # node-0, which holds the replica of node-2's part, has the same bytes.
        one = {"owner": "node-2", "part": "group-0/shard"}
        assert asyncio.run(repaired(root, GROUPS, JOB, **one, others=["node-0"])) == ["node-0"]

        # A part of the first of the tied layers is held neither by its owner nor by the holder of its
        # replica.
        with pytest.raises(
            LayerRestoreError, match=r"layers 0 to 0: no node .* of layer 0 \(missing: node-0, node-2\)"
        ):
            asyncio.run(restored(root, reports, ("node-0", "node-2")))
