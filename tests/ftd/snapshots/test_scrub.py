"""Scrubbing: a flipped bit in a stored snapshot is found, reported and repaired in place to the exact byte."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ftd.snapshots.repair_writer import RepairWriter
from ftd.snapshots.scrub import ArenaScrubbing, Scrubber
from ftd.snapshots.shards.arenas import ArenaSnapshot
from statemachine.messages.trainer import Instruction, RepairWrite
from statemachine.messages.values import Restore, SnapshotGroup
from storage.arena import Arena
from storage.manifest import BLOCK_BYTES, SnapshotPart
from tests.helpers.kept_snapshots import (
    JOB,
    TOKEN,
    Node,
    copy_to_buddy,
    flip,
    make_layer,
    shared_directory,
    write_group,
)
from tests.helpers.waiting import until_async

STEP = 12
SHARD = "group-0/shard"


class Host:
    """A node with its scrubber. ``trainer_pids`` are its trainers, which write what they are sent."""

    def __init__(self, node: Node, sources: dict[str, str], group: SnapshotGroup) -> None:
        self.node = node
        self.published: list[tuple[str, dict[str, Any]]] = []
        self.repaired: list[int] = []
        self.unrepairable: list[int] = []
        self.trainer_pids: list[int] = []
        self.sent: list[RepairWrite] = []
        self.snapshot = Restore(job_id=JOB, step=STEP, generation=1, groups=(group,), sources=sources)
        self.writer = RepairWriter(node.arenas, node.copies, self)
        self.scrubber = Scrubber(
            node=node.name,
            operations=ArenaScrubbing(
                node=node.name,
                arenas=node.arenas,
                token=TOKEN,
                tls=None,
                write_block=self.writer.write_block,
            ),
            rate_bytes_s=1e12,
            period_s=0.01,
            publish_event=lambda name, _reason, details: self.published.append((name, details)),
            on_repaired=self.repaired.append,
            on_unrepairable=self.unrepairable.append,
        )

    def pids(self, device: int | None) -> list[int]:
        return self.trainer_pids

    def send(self, device: int, frame: Instruction) -> bool:
        assert isinstance(frame, RepairWrite)
        self.sent.append(frame)
        arena = Arena.open(self.node.root / JOB / f"device-{device}")
        arena.rewrite(frame.step, frame.generation, frame.part, frame.offset, frame.data)
        return True

    def named(self, name: str) -> list[dict[str, Any]]:
        return [details for published, details in self.published if published == name]

    def stored(self) -> dict[tuple[str, str], bytes]:
        """Return all parts' bytes, by arena and name."""
        return {
            (held.directory.name, part.name): bytes(self.node.arenas.view(held, part))
            for held in self.node.arenas.find(JOB, STEP)
            for part in held.manifest.parts
        }


Body = Callable[[dict[str, Host]], Awaitable[None]]


def with_hosts(
    group: SnapshotGroup, body: Body, sizes: tuple[int, ...] = (900, 77), devices: int = 1
) -> None:
    """:param devices: number of devices of each node, which divide its two layers."""

    async def main(root: Path) -> None:
        names = (*group.owners, group.replica_peer) if group.replica_peer else group.owners
        layers = [make_layer(n, list(sizes), 40) for n in range(group.first_layer, group.end_layer)]
        for first in range(0, 2, 2 // devices):
            share = replace(group, first_layer=first, end_layer=first + 2 // devices)
            roots = {name: root / name for name in group.owners}
            write_group(roots, share, layers[first : share.end_layer], STEP)
        if group.replica_peer:
            copy_to_buddy(root, group.owners[0], group.replica_peer)
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(Node(name, root / name)) for name in names]
            sources = {node.name: node.address for node in nodes}
            hosts = {node.name: Host(node, sources, group) for node in nodes}
            for node in nodes:
                node.copies.begin(JOB)
            try:
                await body(hosts)
            finally:
                for host in hosts.values():
                    await host.scrubber.close()

    with shared_directory() as root:
        asyncio.run(main(root))


def group_of(protection: str, owners: int, buddy: str = "") -> SnapshotGroup:
    names = tuple(f"n{number}" for number in range(owners))
    return SnapshotGroup(first_layer=0, end_layer=2, owners=names, protection=protection, replica_peer=buddy)


def damage(host: Host, held: ArenaSnapshot, part: SnapshotPart, byte: int, bit: int) -> None:
    was = host.node.arenas.view(held, part)[byte]
    host.node.arenas.write(held, part, byte, bytes([was ^ 1 << bit]))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    protection=st.sampled_from(["aec", "aec2", "arc:1", "aec+arc:1"]),
    owners=st.integers(2, 5),
    devices=st.integers(1, 2),
    data=st.data(),
)
@pytest.mark.long
def test_any_flipped_bit_of_any_part_is_found_and_repaired(
    protection: str, owners: int, devices: int, data: st.DataObject
) -> None:
    async def body(hosts: dict[str, Host]) -> None:
        host = hosts[data.draw(st.sampled_from(sorted(hosts)))]
        before = host.stored()
        held = data.draw(st.sampled_from(host.node.arenas.find(JOB, STEP)))
        part = data.draw(st.sampled_from(held.manifest.parts))
        damage(host, held, part, data.draw(st.integers(0, part.size_bytes - 1)), data.draw(st.integers(0, 7)))
        assert host.stored() != before
        host.scrubber.start(host.snapshot)
        await until_async(lambda: host.repaired)
        assert host.stored() == before
        assert host.repaired == [STEP] and not host.unrepairable and len(host.published) == 2
        for details in host.named("ShardCorrupted") + host.named("ShardRepaired"):
            assert (details["owner"], details["step"], details["part"]) == (host.node.name, STEP, part.name)
        assert set(host.named("ShardRepaired")[0]["sources"]) <= set(hosts) - {host.node.name}

    with_hosts(group_of(protection, owners), body, devices=devices)


def test_only_the_corrupt_block_is_fetched_and_the_trainer_writes_it() -> None:
    async def body(hosts: dict[str, Host]) -> None:
        host = hosts["n1"]
        before = host.stored()
        [held] = host.node.arenas.find(JOB, STEP)
        part = held.manifest.part(SHARD)
        damage(host, held, part, BLOCK_BYTES + 5, 2)
        host.trainer_pids = [1]
        host.scrubber.start(host.snapshot)
        await until_async(lambda: host.named("ShardRepaired"))
        assert host.stored() == before
        assert [(frame.part, frame.offset, len(frame.data)) for frame in host.sent] == [
            (SHARD, BLOCK_BYTES, BLOCK_BYTES)
        ]
        assert host.named("ShardRepaired")[0]["size_bytes"] == BLOCK_BYTES
        # Later corruption is found when the snapshot is read again.
        damage(host, held, held.manifest.part("group-0/small"), 1, 0)
        await until_async(lambda: len(host.named("ShardRepaired")) == 2)
        assert host.stored() == before

    with_hosts(group_of("aec", 3), body, sizes=(9 * BLOCK_BYTES,))


def test_a_second_shard_corrupt_at_the_same_place_is_not_used() -> None:
    async def body(hosts: dict[str, Host]) -> None:
        before = {name: host.stored() for name, host in hosts.items()}
        for name in ("n0", "n2"):
            flip(hosts[name].node.root, STEP, SHARD)
        hosts["n0"].scrubber.start(hosts["n0"].snapshot)
        await until_async(lambda: hosts["n0"].named("ShardRepaired"))
        assert "n2" not in hosts["n0"].named("ShardRepaired")[0]["sources"]
        hosts["n2"].scrubber.start(hosts["n2"].snapshot)
        await until_async(lambda: hosts["n2"].named("ShardRepaired"))
        assert {name: host.stored() for name, host in hosts.items()} == before

    with_hosts(group_of("aec2", 5), body)


@pytest.mark.parametrize("corrupt", ["n0", "buddy"])
def test_owner_and_replica_peer_repair_each_other(corrupt: str) -> None:
    async def body(hosts: dict[str, Host]) -> None:
        host = hosts[corrupt]
        before = host.stored()
        [held] = host.node.arenas.find(JOB, STEP)
        for part in held.manifest.parts:
            damage(host, held, part, part.size_bytes // 2, 5)
        host.scrubber.start(host.snapshot)
        await until_async(lambda: len(host.named("ShardRepaired")) == 2)
        assert host.stored() == before
        assert all(
            {*published["sources"], corrupt} == set(hosts) for published in host.named("ShardRepaired")
        )
        assert {details["owner"] for _, details in host.published} == {"n0"}

    with_hosts(group_of("buddy", 1, "buddy"), body)


def test_corruption_beyond_repair_is_reported_and_a_new_snapshot_requested() -> None:
    async def body(hosts: dict[str, Host]) -> None:
        host = hosts["n0"]
        flip(host.node.root, STEP, SHARD)
        await hosts["n1"].node.server.close()
        host.scrubber.start(host.snapshot)
        await until_async(lambda: host.unrepairable)
        assert host.unrepairable[0] == STEP and len(host.named("ShardCorrupted")) >= 2
        assert not host.named("ShardRepaired") and not host.repaired
        await hosts["n1"].node.server.start()

    with_hosts(group_of("aec", 2), body)


def test_a_released_snapshot_is_not_reported_as_corrupt() -> None:
    async def body(hosts: dict[str, Host]) -> None:
        host = hosts["n0"]
        flip(host.node.root, STEP, SHARD)
        arena = Arena.open(host.node.root / JOB / "device-0")
        arena.release([STEP])
        host.scrubber.start(host.snapshot)
        await asyncio.sleep(0.1)
        assert host.published == [] and host.unrepairable == []

    with_hosts(group_of("aec", 2), body)


def test_an_injected_fault_flips_one_bit_of_own_parts_only() -> None:
    async def body(hosts: dict[str, Host]) -> None:
        host = hosts["n0"]
        assert host.writer.find_own_parts(None, None) == [] == host.writer.find_own_parts(host.snapshot, 3)
        before = b"".join(host.stored().values())
        host.writer.flip_bit(host.writer.find_own_parts(host.snapshot, 0))
        after = b"".join(host.stored().values())
        changed = [a ^ b for a, b in zip(before, after, strict=True) if a != b]
        assert len(changed) == 1 and changed[0].bit_count() == 1

    with_hosts(group_of("aec", 2), body)
