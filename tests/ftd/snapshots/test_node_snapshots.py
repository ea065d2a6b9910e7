"""The snapshot service of a daemon: the arenas of its job, snapshots found at start, and staging of layers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ftd.config.daemon import DaemonConfig, parse_daemon_config
from ftd.snapshots.restoring.staging import LocatedLayer, StagingDirectory
from ftd.snapshots.service import SnapshotService
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.copy_sender import CopySender
from ftd.snapshots.shards.protocol import AsyncRateLimiter, bearer_token
from ftd.snapshots.shards.sources import SnapshotSource
from ftd.snapshots.storage import LocalSnapshotStorage
from planner.values import Device, PipelinePlacement, Plan, Policy, StagePlacement
from statemachine.agent.events import (
    SnapshotCopiesChanged,
    SnapshotCopyCommitted,
    SnapshotCopyFailed,
    SnapshotsFound,
    StagingFailed,
)
from statemachine.effects import SendSnapshotCopy
from statemachine.events import Event
from statemachine.messages.cluster import Resume
from statemachine.messages.trainer import Instruction, StagingCorrupted
from statemachine.messages.values import (
    HeldSnapshot,
    Job,
    ReplicaPeer,
    Restore,
    SnapshotGroup,
    SnapshotPolicy,
)
from storage.checkpoint import CheckpointStore
from storage.shards import Bytes
from storage.staged import read_staged
from tests.helpers.kept_snapshots import (
    JOB,
    Node,
    flip,
    held_keys,
    make_layer,
    payload_of,
    recording_driver,
    shared_directory,
    write_group,
)
from tests.helpers.waiting import until_async

STEP = 8
GROUP = SnapshotGroup(first_layer=0, end_layer=2, owners=("n0", "n1"), protection="aec")


class Daemon:
    """The parts of a daemon that ``SnapshotService`` needs."""

    def __init__(self, root: Path, **table: Any) -> None:
        self.events: list[Event] = []
        self.published: list[tuple[str, dict[str, Any]]] = []
        node = {"name": "n0", "host": "127.0.0.1", "snapshot_dir": str(root), "devices": 2, **table}
        self.config: DaemonConfig = parse_daemon_config(
            {"cluster": "lab", "secret": "sesame", "node": node}, directory=root
        )
        self.snapshots = SnapshotService(
            self.config,
            LocalSnapshotStorage(self.config),
            driver=recording_driver(self.events.append),
            publish_event=lambda name, _reason, details: self.published.append((name, details)),
            trainers=self,
        )

    def pids(self, device: int | None) -> list[int]:
        return []

    def send(self, device: int, frame: Instruction) -> bool:
        return False


def job(every_steps: int = 5) -> Job:
    policy = Policy(devices_per_node=2, global_batch=8, microbatch_rows=4)
    snapshot = SnapshotPolicy(every_steps=every_steps, protection="aec")
    return Job(job_id=JOB, name="job", steps=9, policy=policy, snapshot=snapshot)


def resume(generation: int, sources: dict[str, str], step: int = STEP) -> Resume:
    stages = tuple(
        StagePlacement(first_layer=n, end_layer=n + 1, devices=(Device(node="n0", index=n),)) for n in (0, 1)
    )
    pipeline = PipelinePlacement(stages=stages, first_microbatch=0, microbatches=2, estimated_s=0.1)
    plan = Plan(pipelines=(pipeline,), transfers=(), method="best", reason="", estimated_iteration_s=0.1)
    return Resume(
        generation=generation,
        job_id=JOB,
        step=step,
        vote=None,
        plan=plan,
        hosts={"n0": "127.0.0.1"},
        rendezvous="127.0.0.1:1",
        restore=Restore(job_id=JOB, step=step, generation=1, groups=(GROUP,), sources=sources),
    )


def with_daemon(body: Callable[[Daemon, Node], Awaitable[None]], **table: Any) -> None:
    """Run ``body`` with a daemon whose memory has a snapshot, and a peer that serves its own part."""

    async def main(root: Path) -> None:
        roots = {"n0": root / "lab-n0", "n1": root / "lab-n1"}
        layers = [make_layer(n, [900, 77], 40) for n in (0, 1)]
        write_group(roots, GROUP, layers, STEP)
        daemon = Daemon(root, **table)
        await daemon.snapshots.start()
        try:
            async with Node("n1", roots["n1"]) as peer:
                await body(daemon, peer)
        finally:
            await daemon.snapshots.close()

    with shared_directory() as root:
        asyncio.run(main(root))


def stage(daemon: Daemon, command: Resume) -> list[str]:
    """Stage for both devices, and return the directories that they get."""
    sent: list[str] = []
    for device in (0, 1):
        daemon.snapshots.stager.resume(command, device, sent.append)
    return sent


def test_snapshots_of_earlier_daemons_are_found_and_reported() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        await daemon.snapshots.scan()
        [event] = daemon.events
        assert isinstance(event, SnapshotsFound)
        assert event.snapshots == (HeldSnapshot(job_id=JOB, step=STEP, generation=1),)
        assert daemon.published == []
        daemon.events.clear()
        flip(daemon.config.snapshot_dir, STEP, "group-0/shard")
        await daemon.snapshots.scan()
        assert daemon.events == [event], "of a shard with a wrong bit the rest still counts"
        details = {"owner": "n0", "job": JOB, "step": STEP, "part": "group-0/shard"}
        assert daemon.published == [("ShardCorrupted", details)]

    with_daemon(body)


def test_layers_are_staged_once_for_all_devices_and_then_freed() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        sent = stage(daemon, resume(3, {"n1": peer.address}))
        await until_async(lambda: len(sent) == 2)
        assert sent[0] == sent[1]
        directory = Path(sent[0])
        assert [path.name for path in sorted(directory.glob("layer-*"))] == [
            "layer-0.staged",
            "layer-1.staged",
        ]
        daemon.snapshots.stager.resumed(0, 2)
        daemon.snapshots.stager.resumed(0, 3)
        assert directory.exists()
        daemon.snapshots.stager.resumed(1, 3)
        assert not directory.exists()
        again = stage(daemon, resume(4, {"n1": peer.address}))
        await until_async(lambda: len(again) == 2)
        daemon.snapshots.stager.clear()
        assert not Path(again[0]).exists()
        assert daemon.events == []

    with_daemon(body)


def test_a_corrupt_shard_is_repaired_after_a_restore() -> None:
    """The repair does not wait for the next scrubbing, because another loss would need these bytes."""

    async def body(daemon: Daemon, peer: Node) -> None:
        shard = daemon.config.snapshot_dir / JOB / "device-0" / "slot-0"
        before = shard.read_bytes()
        flip(daemon.config.snapshot_dir, STEP, "group-0/shard")
        sent = stage(daemon, resume(3, {"n1": peer.address}))
        await until_async(
            lambda: len(sent) == 2 and "ShardRepaired" in [name for name, _ in daemon.published]
        )
        assert shard.read_bytes() == before
        assert {name for name, _ in daemon.published} == {"ShardCorrupted", "ShardRepaired"}

    with_daemon(body)


def test_a_trainer_that_finds_borrowed_bytes_corrupt_gets_copies_once() -> None:
    """A bit changes that only the trainer reads, so the node decodes its shard from the others."""

    async def body(daemon: Daemon, peer: Node) -> None:
        sent = stage(daemon, resume(3, {"n1": peer.address}))
        await until_async(lambda: len(sent) == 2)
        directory = Path(sent[0])
        assert payload_of(directory, 0)[2] and payload_of(directory, 1)[2]
        flip(daemon.config.snapshot_dir, STEP, "group-0/shard")
        with pytest.raises(AssertionError):
            payload_of(directory, 0)
        stager = daemon.snapshots.stager
        stager.handle_corrupt(
            0, StagingCorrupted(generation=2, part="group-0/shard", detail="of another generation")
        )
        stager.handle_corrupt(0, StagingCorrupted(generation=3, part="group-0/shard", detail="wrong"))
        await until_async(lambda: len(sent) == 3)
        assert sent[2] == sent[0]
        layer = make_layer(0, [900, 77], 40)
        assert payload_of(directory, 0) == (layer.header, layer.payload.tobytes(), 0)
        assert read_staged(directory, 1).borrowed, "the other trainer may be reading that"
        assert "ShardCorrupted" in {name for name, _ in daemon.published}
        stager.handle_corrupt(0, StagingCorrupted(generation=3, part="", detail="gone"))
        [event] = daemon.events
        assert isinstance(event, StagingFailed) and "device 0 cannot use" in event.failure.detail
        stager.handle_corrupt(1, StagingCorrupted(generation=3, part="", detail="gone"))
        assert len(sent) == 3 and len(daemon.events) == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftd.snapshots.restoring.read_plan._MIN_BORROWED_BYTES", 64)
        with_daemon(body)


def test_a_trainer_gets_its_directory_as_soon_as_its_layers_are_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        taken, gate = StagingDirectory.put_located, asyncio.Event()

        async def slowly(self: StagingDirectory, run: Sequence[LocatedLayer], memory: Bytes) -> None:
            if run[0][0].layer == 1:
                await gate.wait()
            await taken(self, run, memory)

        monkeypatch.setattr(
            StagingDirectory, "group_layers", lambda self, layers: [[n] for n in sorted(layers)]
        )
        monkeypatch.setattr(StagingDirectory, "put_located", slowly)
        published: list[int] = []
        for device in (0, 1):
            daemon.snapshots.stager.resume(
                resume(3, {"n1": peer.address}), device, lambda _, device=device: published.append(device)
            )
        await until_async(lambda: published == [0])
        gate.set()
        await until_async(lambda: published == [0, 1])

    with_daemon(body)


def test_a_newer_generation_ends_the_staging() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        old = stage(daemon, resume(3, {"n1": peer.address}))
        daemon.snapshots.abandon()
        new = stage(daemon, resume(4, {"n1": peer.address}))
        await until_async(lambda: len(new) == 2)
        await asyncio.sleep(0.05)
        assert old == [] and new[0].endswith("staging-4")
        assert daemon.events == []

    with_daemon(body)


def test_a_failed_restore_is_fed_to_the_machine() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        for part in ("group-0/shard", "group-0/small"):
            flip(peer.root, STEP, part)
            flip(daemon.config.snapshot_dir, STEP, part)
        sent = stage(daemon, resume(3, {"n1": peer.address}))
        await until_async(lambda: daemon.events)
        [event] = daemon.events
        assert isinstance(event, StagingFailed)
        assert (event.failure.generation, event.failure.bad, sent) == (3, ("n0", "n1"), [])
        assert {details["owner"] for _, details in daemon.published} == {"n0", "n1"}

    with_daemon(body)


def test_layers_come_from_a_persistent_checkpoint_where_the_restore_names_one(tmp_path: Path) -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        store = CheckpointStore.at(str(tmp_path))
        layers = [make_layer(n, [300]) for n in (0, 1)]
        draft = store.begin(STEP)
        files = [store.write_layer(draft, n, layer.header, [layer.payload]) for n, layer in enumerate(layers)]
        store.commit(draft, files, job="gpt", job_id="old", vote=None, written_at=1.0, ftd_version="0")
        source = Restore(
            job_id=JOB, step=STEP, generation=0, groups=(), sources={}, url=str(tmp_path), job_name="gpt"
        )
        sent = stage(daemon, replace(resume(3, {}), restore=source))
        await until_async(lambda: len(sent) == 2)
        for n, layer in enumerate(layers):
            assert payload_of(Path(sent[0]), n)[1] == layer.payload.tobytes()
        (tmp_path / f"step-{STEP:012d}" / "layer-0001.bin").write_bytes(b"half")
        stage(daemon, replace(resume(4, {}), restore=source))
        await until_async(lambda: daemon.events)
        [event] = daemon.events
        assert isinstance(event, StagingFailed)
        assert (
            event.failure.corrupt
            and event.failure.bad == ()
            and "layer-0001.bin has 4 bytes" in event.failure.detail
        )

    with_daemon(body)


def test_an_internal_error_in_staging_is_fed_to_the_machine(monkeypatch: Any) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("cannot be")

    async def body(daemon: Daemon, peer: Node) -> None:
        monkeypatch.setattr("ftd.snapshots.trainer_staging.StagingDirectory", broken)
        stage(daemon, resume(3, {"n1": peer.address}))
        await until_async(lambda: daemon.events)
        [event] = daemon.events
        assert isinstance(event, StagingFailed)
        assert (event.failure.bad, "internal error" in event.failure.detail) == ((), True)

    with_daemon(body)


def test_missing_space_for_layers_is_reported_as_this_nodes_failure(monkeypatch: Any) -> None:
    def full(self: Path, data: object) -> int:
        raise OSError(28, "No space left on device")

    async def body(daemon: Daemon, peer: Node) -> None:
        monkeypatch.setattr(Path, "write_bytes", full)
        stage(daemon, resume(3, {"n1": peer.address}))
        await until_async(lambda: daemon.events)
        [event] = daemon.events
        assert isinstance(event, StagingFailed)
        assert event.failure.bad == () and "No space left" in event.failure.detail

    with_daemon(body)


def test_arenas_belong_to_the_job_are_limited_and_removed_with_it() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        root = daemon.config.snapshot_dir
        (root / "older-job" / "device-0").mkdir(parents=True)
        assert daemon.snapshots.prepare(job(every_steps=0), 1) == ("", None)
        assert daemon.snapshots.prepare(job(), 1) == (str(root / JOB / "device-1"), 3 << 20)
        assert not (root / "older-job").exists() and (root / JOB).exists()
        second = Daemon(root.parent)
        await second.snapshots.start()
        assert second.snapshots.prepare(job(), 0) == ("", None)
        assert [name for name, _ in second.published] == ["SnapshotsUnavailable"]
        await second.snapshots.close()
        daemon.snapshots.remove(JOB)
        await until_async(lambda: not (root / JOB).exists())

    with_daemon(body, snapshot_limit_mib=6)


def send_to(address: str, generation: int = 1) -> SendSnapshotCopy:
    buddy = ReplicaPeer(node="n1", address=address)
    return SendSnapshotCopy(cause="c", job_id=JOB, step=STEP, generation=generation, replica_peer=buddy)


def test_a_snapshot_is_sent_to_the_replica_peer_and_failures_are_reported() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        def last() -> Event:
            [event] = daemon.events
            daemon.events.clear()
            return event

        daemon.snapshots.send_copy(send_to(peer.address))
        await until_async(lambda: daemon.events)
        failed = last()
        assert isinstance(failed, SnapshotCopyFailed)
        assert failed.failure.detail.startswith("no copy at its replica peer n1: the snapshot server of n1")
        peer.copies.begin(JOB)
        daemon.snapshots.send_copy(send_to(peer.address))
        await until_async(lambda: daemon.events)
        sent = last()
        assert isinstance(sent, SnapshotCopyCommitted) and (sent.generation, sent.step) == (1, STEP)
        assert held_keys(peer.copies.held()) == [(STEP, 1, "n0")]
        daemon.snapshots.send_copy(send_to(peer.address, generation=2))
        await until_async(lambda: daemon.events)
        gone = last()
        assert isinstance(gone, SnapshotCopyFailed) and gone.failure.detail.endswith(
            "not in this node's memory"
        )

    with_daemon(body)


def test_copies_of_the_present_job_are_accepted_reported_retained_and_removed() -> None:
    async def body(daemon: Daemon, peer: Node) -> None:
        limits = {prepared[1] for prepared in (daemon.snapshots.prepare(job(), 0),)}
        assert limits == {(64 << 20) // 2}
        both = replace(job(), snapshot=SnapshotPolicy(every_steps=5, protection="aec+buddy"))
        directory, limit = daemon.snapshots.prepare(both, 0)
        assert limit == (64 << 20) // 4
        async with ShardClient(bearer_token("sesame")) as client:
            sender = CopySender(client, peer.arenas, owner="n1", rate=AsyncRateLimiter(None))
            to = SnapshotSource(node="n0", address=f"127.0.0.1:{daemon.snapshots.storage.port}")
            await sender.send(peer.arenas.find(JOB, STEP), to)
        [published] = [event for event in daemon.events if isinstance(event, SnapshotCopiesChanged)]
        assert published.snapshots == (HeldSnapshot(job_id=JOB, step=STEP, generation=1, owner="n1"),)
        copies = Path(directory).parent / "copy-0-n1"
        assert copies.is_dir()
        daemon.snapshots.retain_copies(JOB, STEP + 1)
        assert isinstance(daemon.events[-1], SnapshotCopiesChanged) and daemon.events[-1].snapshots == ()
        await until_async(lambda: not copies.exists())
        daemon.snapshots.remove(JOB)
        await until_async(lambda: not Path(directory).parent.exists())

    with_daemon(body, snapshot_limit_mib=64)
