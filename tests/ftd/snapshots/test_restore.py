"""Layers restored from several nodes' memory: exact bytes after every loss that the code withstands."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from shutil import rmtree

import pytest

from ftd.snapshots.restoring.restore import LayerRestoreError, Restorer, RestoreStatistics
from ftd.snapshots.restoring.staging import LayerStream, StagingDirectory
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from statemachine.messages.values import Restore, SnapshotGroup
from storage.manifest import BLOCK_BYTES
from storage.shards import Bytes
from tests.helpers.kept_snapshots import (
    JOB,
    TOKEN,
    Layer,
    Node,
    copy_to_buddy,
    flip,
    make_layer,
    payload_of,
    shared_directory,
    write_group,
)

STEP = 40


@pytest.fixture(autouse=True)
def little_is_lent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftd.snapshots.restoring.read_plan._MIN_BORROWED_BYTES", 64)


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Nodes ``n0``, ``n1``, …, their arenas, and those that answer."""

    root: Path
    groups: tuple[SnapshotGroup, ...]
    layers: dict[int, Layer] = field(default_factory=dict)
    reports: list[tuple[str, str, str]] = field(default_factory=list)
    lent_bytes: int = 0
    """Bytes borrowed in the last restore."""

    def write(self, generation: int = 1, sizes: Sequence[int] = (700, 33, 5000)) -> None:
        for group in self.groups:
            made = [
                make_layer(n, [size + 16 * n for size in sizes], 50 if n % 2 else 0)
                for n in range(group.first_layer, group.end_layer)
            ]
            self.layers |= dict(zip(range(group.first_layer, group.end_layer), made, strict=True))
            roots = {owner: self.root / owner for owner in group.owners}
            write_group(roots, group, made, STEP, generation)

    async def restore(
        self,
        node: str,
        layers: Iterable[int],
        *,
        without: Iterable[str] = (),
        silent: Iterable[str] = (),
        generation: int = 1,
        one_by_one: bool = False,
        lend: bool = True,
        behind: Callable[[int], None] = lambda _layer: None,
    ) -> RestoreStatistics:
        """Restore on ``node``. Nodes in ``without`` are known to be lost, and ``silent`` ones do not answer."""
        owners = {owner for group in self.groups for owner in group.owners} - {node, *without}
        async with AsyncExitStack() as stack:
            sources = dict.fromkeys(set(silent) & owners, "127.0.0.1:1")
            for owner in sorted(owners - set(silent)):
                served = await stack.enter_async_context(Node(owner, self.root / owner))
                sources[owner] = served.address
            arenas = NodeArenas(self.root / node, devices=1)
            client = await stack.enter_async_context(ShardClient(TOKEN, stall_s=30.0))
            directory = arenas.make_staging(JOB, 9)
            wanted = list(layers)
            stage = StagingDirectory(directory, borrows=lend, staged=behind)
            before: dict[int, Bytes] = {}

            async def put(layer: int, header: bytes, payload: Bytes) -> None:
                for number, kept in before.items():
                    assert kept.tobytes() == self.layers[number].payload.tobytes()
                before.clear()
                before[layer] = payload
                await stage.put(layer, header, payload)

            done = await Restorer(
                restore=Restore(
                    job_id=JOB, step=STEP, generation=generation, groups=self.groups, sources=sources
                ),
                node=node,
                arenas=arenas,
                client=client,
                report_corruption=lambda *report: self.reports.append(report),
            ).run(wanted, LayerStream(put) if one_by_one else stage)
            self.lent_bytes = 0
            for number in wanted:
                header, payload, lent = payload_of(directory, number)
                assert header == self.layers[number].header
                assert payload == self.layers[number].payload.tobytes(), number
                self.lent_bytes += lent
            assert len(list(directory.glob("layer-*"))) == len(wanted)
            return done


def names(count: int) -> tuple[str, ...]:
    return tuple(f"n{i}" for i in range(count))


def group(first: int, end: int, owners: Sequence[str], protection: str) -> SnapshotGroup:
    return SnapshotGroup(first_layer=first, end_layer=end, owners=tuple(owners), protection=protection)


@pytest.mark.parametrize("owners", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(("scheme", "losses"), [("aec", 1), ("aec2", 2), ("aec+arc:1", 2), ("none", 0)])
@pytest.mark.long
def test_exact_bytes_after_every_loss_within_the_guarantee(owners: int, scheme: str, losses: int) -> None:
    """The nodes are a survivor, and one that owned nothing of it. Two owners withstand at most one loss."""
    losses = min(losses, owners - 1)

    async def main(cluster: Cluster) -> None:
        for count in range(losses + 1):
            for lost in combinations(names(owners), count):
                survivor = next(name for name in names(owners) if name not in lost)
                assert (await cluster.restore(survivor, range(3), without=lost)).own_bytes > 0
                assert cluster.lent_bytes > 0
                done = await cluster.restore("newcomer", [1], without=lost)
                assert done.own_bytes == 0 and done.decoded_groups == bool(lost)
                assert cluster.lent_bytes == 0
        assert cluster.reports == []

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(owners), scheme),))
        cluster.write()
        asyncio.run(main(cluster))


def test_unequal_pipelines_make_groups_and_every_node_gets_its_new_layers() -> None:
    groups = (
        group(0, 2, ("n0", "n2", "n4"), "aec"),
        group(2, 3, ("n0", "n3", "n4"), "aec"),
        group(3, 6, ("n1", "n3", "n4"), "aec"),
    )

    async def main(cluster: Cluster) -> None:
        for node in ("n0", "n1", "n2", "n3", "new"):
            await cluster.restore(node, range(6), without=["n4"])
        done = await cluster.restore("n0", [0, 2, 3, 5], without=["n3"])
        assert done.decoded_groups == 2
        again = await cluster.restore("n0", [5, 3, 2, 0], without=["n3"], one_by_one=True)
        assert again == done
        whole = await cluster.restore("n4", range(6))
        part = await cluster.restore("n4", [4])
        assert 0 < part.fetched_bytes < whole.fetched_bytes / 3

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=groups)
        cluster.write()
        asyncio.run(main(cluster))


def test_layers_divided_among_devices_are_found_in_all_arenas_of_a_node() -> None:
    """Layers 0 to 5 have the same owners; each owner's two devices have written three of them each."""
    run, shares = group(0, 6, names(3), "aec"), [group(first, first + 3, names(3), "aec") for first in (0, 3)]

    async def main(cluster: Cluster) -> None:
        assert (await cluster.restore("n0", range(6))).decoded_groups == 0
        assert cluster.lent_bytes > 0
        for node in ("n0", "newcomer"):
            assert (await cluster.restore(node, [1, 2, 4], without=["n1"])).decoded_groups == 2
            await cluster.restore(node, range(6), without=["n2"], one_by_one=True)
        # One arena of a node is removed: its layers are decoded, and those of the node's other arena are
        # not.
        rmtree(cluster.root / "n1" / JOB / "device-3")
        assert (await cluster.restore("n0", range(6))).decoded_groups == 1
        rmtree(cluster.root / "n2" / JOB / "device-3")
        assert (await cluster.restore("n0", range(3))).decoded_groups == 0
        with pytest.raises(LayerRestoreError, match=r"layers 3 to 5: .*\(n1, n2\)"):
            await cluster.restore("n0", range(6))
        rmtree(cluster.root / "n0" / JOB / "device-3")
        with pytest.raises(
            LayerRestoreError, match="no node that is present has the headers of layers 3, 4, 5"
        ):
            await cluster.restore("n0", range(6))

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=tuple(shares))
        cluster.write()
        cluster.groups = (run,)
        asyncio.run(main(cluster))


def test_a_flipped_bit_counts_as_a_lost_owner_and_is_reported() -> None:
    async def main(cluster: Cluster) -> None:
        flip(cluster.root / "n1", STEP, "group-0/shard")
        for node in ("n0", "n1", "n2"):
            cluster.reports.clear()
            assert (await cluster.restore(node, range(3))).decoded_groups == 1
            assert [(owner, part) for owner, part, _ in cluster.reports] == [("n1", "group-0/shard")]
        flip(cluster.root / "n0", STEP, "group-0/small")
        assert (await cluster.restore("n0", range(3))).decoded_groups == 1
        flip(cluster.root / "n2", STEP, "group-0/shard")
        with pytest.raises(
            LayerRestoreError, match=r"layers 0 to 2: owners \[1, 2\] of 3 are lost.*\(n1, n2\)"
        ) as caught:
            await cluster.restore("n0", range(3))
        assert caught.value.bad == ("n0", "n1", "n2")

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


def test_a_block_that_arrives_corrupt_is_decoded_from_others() -> None:
    """The server does not verify this shard itself; the receiver verifies its blocks."""

    async def main(cluster: Cluster) -> None:
        flip(cluster.root / "n1", STEP, "group-0/shard")
        assert (await cluster.restore("n0", range(3))).own_bytes > 0
        assert [report[:2] for report in cluster.reports] == [("n1", "group-0/shard")]
        assert "bytes that differ from what was written" in cluster.reports[0][2]

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write(sizes=(3 * BLOCK_BYTES, 33, 5000))
        asyncio.run(main(cluster))


@pytest.mark.long
def test_shards_of_a_silent_node_are_decoded_from_others() -> None:
    async def main(cluster: Cluster) -> None:
        assert (await cluster.restore("n0", range(3), silent=["n2"])).decoded_groups == 1
        assert cluster.reports[0][:2] == ("n2", "manifest")
        with pytest.raises(LayerRestoreError, match="cannot make up") as caught:
            await cluster.restore("n0", range(3), silent=["n1", "n2"])
        assert caught.value.bad == ("n1", "n2")

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(4), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


def test_a_shard_that_turns_corrupt_meanwhile_is_decoded_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest was intact when it was requested; then its snapshot is overwritten."""

    async def main(cluster: Cluster) -> None:
        asked = ShardClient.manifest

        async def then_gone(self: ShardClient, source, job, step):  # type: ignore[no-untyped-def]
            found = await asked(self, source, job, step)
            if source.node == "n1":
                (cluster.root / "n1" / JOB / "device-0" / f"step-{STEP:012d}.json").unlink()
            return found

        monkeypatch.setattr(ShardClient, "manifest", then_gone)
        assert (await cluster.restore("n0", range(3))).own_bytes > 0
        assert ("n1", "group-0/shard") in [report[:2] for report in cluster.reports]

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


def test_own_memory_released_meanwhile_is_decoded_from_others() -> None:
    async def main(cluster: Cluster) -> None:
        manifest = cluster.root / "n0" / JOB / "device-0" / f"step-{STEP:012d}.json"

        def release(layer: int) -> None:
            if layer == 0:
                manifest.unlink()

        await cluster.restore("n0", range(3), one_by_one=True, behind=release)
        assert [report[:2] for report in cluster.reports] == [("n0", "group-0/shard")]

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


@pytest.mark.parametrize(("after", "part"), [("find", "manifest"), ("find_corrupt", "group-0/small")])
def test_own_memory_that_vanishes_meanwhile_is_decoded_from_others(
    monkeypatch: pytest.MonkeyPatch, after: str, part: str
) -> None:
    """Its slot is gone after it was found, or after it was verified."""
    work = getattr(NodeArenas, after)

    def then_gone(self: NodeArenas, *arguments: object) -> object:
        found = work(self, *arguments)
        if self.root.name == "n0":
            (self.root / JOB / "device-0" / "slot-0").unlink(missing_ok=True)
        return found

    async def main(cluster: Cluster) -> None:
        monkeypatch.setattr(NodeArenas, after, then_gone)
        assert (await cluster.restore("n0", range(3))).own_bytes == 0
        assert ("n0", part) in [report[:2] for report in cluster.reports]

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


def test_memory_of_an_attempt_that_failed_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt decodes what the first would have borrowed, so it needs more memory."""
    manifests: list[Path] = []
    allocate = StagingDirectory.allocate

    def then_release(self: StagingDirectory, size_bytes: int) -> Bytes:
        memory = allocate(self, size_bytes)
        for manifest in manifests:
            manifest.unlink(missing_ok=True)
        return memory

    async def main(cluster: Cluster) -> None:
        manifests.append(cluster.root / "n0" / JOB / "device-0" / f"step-{STEP:012d}.json")
        monkeypatch.setattr(StagingDirectory, "allocate", then_release)
        await cluster.restore("n0", range(3))
        assert [report[:2] for report in cluster.reports] == [("n0", "group-0/shard")]
        assert len(list((cluster.root / "n0" / JOB / "staging-9").glob("bytes-*"))) == 1

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


def test_a_snapshot_of_another_generation_or_layout_is_ignored() -> None:
    async def main(cluster: Cluster) -> None:
        with pytest.raises(LayerRestoreError, match="no node that is present has the headers"):
            await cluster.restore("n0", range(3), generation=2)
        cluster.groups = (group(0, 3, ("n1", "n0", "n2"), "aec"),)
        for owners, scheme in ((("n1", "n0", "n2"), "aec"), (names(3), "aec2"), (names(2), "aec")):
            cluster.groups = (group(0, 3, owners, scheme),)
            with pytest.raises(LayerRestoreError, match="no node"):
                await cluster.restore("n0", range(3))
        with pytest.raises(LayerRestoreError, match=r"no layers \[3\]"):
            await cluster.restore("n0", range(4))

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 3, names(3), "aec"),))
        cluster.write()
        asyncio.run(main(cluster))


def test_layers_of_no_bytes_and_of_one_owner() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.restore("n0", range(2))
        await cluster.restore("other", range(2))

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(group(0, 2, ("n0",), "aec"),))
        cluster.write(sizes=())
        asyncio.run(main(cluster))


def alone(first: int, end: int, owner: str, buddy: str) -> SnapshotGroup:
    return SnapshotGroup(
        first_layer=first, end_layer=end, owners=(owner,), protection="aec+buddy", replica_peer=buddy
    )


def test_a_copy_replaces_an_owner_that_is_lost_corrupt_or_silent() -> None:
    async def main(cluster: Cluster) -> None:
        whole = await cluster.restore("n0", range(4))
        assert whole.own_bytes > 0 and cluster.reports == []
        # n0 has a copy of what n1 alone owned, so nothing is fetched.
        done = await cluster.restore("n0", range(4), without=["n1"])
        assert done.fetched_bytes == 0 and cluster.reports == []
        await cluster.restore("newcomer", range(4), without=["n1"])
        await cluster.restore("newcomer", range(4), silent=["n1"])
        assert {report[:2] for report in cluster.reports} == {("n1", "manifest")}
        cluster.reports.clear()
        flip(cluster.root / "n1", STEP, "group-2/shard", device=2)
        await cluster.restore("newcomer", range(4))
        assert [report[:2] for report in cluster.reports] == [("n1", "group-2/shard")]
        (cluster.root / "n0" / JOB / "copy-2-n1").rename(cluster.root / "gone")
        with pytest.raises(LayerRestoreError, match="layers 2 to 3") as caught:
            await cluster.restore("newcomer", range(4))
        assert caught.value.bad == ("n1",)

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(alone(0, 2, "n0", "n1"), alone(2, 4, "n1", "n0")))
        cluster.write()
        copy_to_buddy(root, "n0", "n1", 0)
        copy_to_buddy(root, "n1", "n0", 2)
        asyncio.run(main(cluster))


def test_a_copy_replaces_an_owner_that_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(cluster: Cluster) -> None:
        asked = ShardClient.manifest

        async def then_gone(self: ShardClient, source, job, step):  # type: ignore[no-untyped-def]
            found = await asked(self, source, job, step)
            if source.node == "n1":
                (cluster.root / "n1" / JOB / "device-2" / f"step-{STEP:012d}.json").unlink()
            return found

        monkeypatch.setattr(ShardClient, "manifest", then_gone)
        await cluster.restore("newcomer", [2, 3])
        assert ("n1", "group-2/shard") in [report[:2] for report in cluster.reports]

    with shared_directory() as root:
        cluster = Cluster(root=root, groups=(alone(0, 2, "n0", "n1"), alone(2, 4, "n1", "n0")))
        cluster.write()
        copy_to_buddy(root, "n1", "n0", 2)
        asyncio.run(main(cluster))
