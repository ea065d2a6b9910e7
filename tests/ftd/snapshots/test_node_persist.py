"""A node's share of persistent checkpoints: from the memory of several nodes to a disk, and back."""

import asyncio
import contextlib
import errno
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from ftd.snapshots.persist import CheckpointWriter, Persister, read_checkpoint
from ftd.snapshots.restoring.restore import LayerRestoreError
from ftd.snapshots.restoring.staging import StagingDirectory
from ftd.snapshots.shards.arenas import NodeArenas
from statemachine.agent.events import PersistEnded
from statemachine.events import Event
from statemachine.messages.cluster import LayersPersisted, Persist, PersistFailed
from statemachine.messages.values import Restore, Snapshot, SnapshotGroup, Vote
from storage.checkpoint import CheckpointStore
from storage.description import ModelDescription, encode_description
from storage.layerfile import CHUNK_BYTES
from tests.helpers.kept_snapshots import (
    JOB,
    TOKEN,
    Layer,
    Node,
    flip,
    make_layer,
    payload_of,
    recording_driver,
    shared_directory,
    write_group,
)
from tests.helpers.waiting import until_async

STEP = 40
NODES = ("n0", "n1", "n2")
GROUPS = (
    SnapshotGroup(first_layer=0, end_layer=3, owners=NODES, protection="aec"),
    SnapshotGroup(first_layer=3, end_layer=5, owners=("n0", "n2"), protection="aec"),
)
VOTE = Vote(loss=1.5, gradient_norm=0.5)
RECORD = Snapshot(step=STEP, generation=1, vote=VOTE, groups=GROUPS)


@dataclass(slots=True, kw_only=True)
class Hosts:
    """A snapshot in the memory of ``NODES``, and a directory that all of them can access."""

    root: Path
    url: str
    layers: dict[int, Layer] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    reports: list[tuple[str, str, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Events that the persister of the present test fed."""
    description: bytes = b""
    """Description sent by the trainers of every node; empty if the model has none."""

    def write(self, sizes: Sequence[int] = (700, 33, 5000)) -> None:
        for group in GROUPS:
            numbers = range(group.first_layer, group.end_layer)
            made = [make_layer(n, [size + 16 * n for size in sizes], 50 if n % 2 else 0) for n in numbers]
            self.layers |= dict(zip(numbers, made, strict=True))
            write_group({owner: self.root / owner for owner in group.owners}, group, made, STEP)

    def order(self, layers: Iterable[int], attempt: str = "7") -> Persist:
        return Persist(
            job_id=JOB,
            job_name="gpt",
            url=self.url,
            attempt=attempt,
            record=RECORD,
            layers=tuple(layers),
            sources=self.sources,
        )

    def persister(
        self, node: str, rate_bytes_s: float | None = None, description_timeout_s: float = 60.0
    ) -> Persister:
        return Persister(
            writing=CheckpointWriter(node=node, arenas=NodeArenas(self.root / node, devices=1), token=TOKEN),
            rate_bytes_s=rate_bytes_s,
            description_timeout_s=description_timeout_s,
            driver=recording_driver(self.events.append),
            report_corruption=lambda job, step: lambda *report: self.reports.append(report),
        )

    async def persist(self, node: str, order: Persist) -> LayersPersisted | PersistFailed:
        """Carry out the order and return the answer that was fed."""
        persister = self.persister(node)
        persister.set_description(order.job_id, self.description)
        self.events.clear()
        persister.begin(order)
        await until_async(lambda: self.events)
        await persister.close()
        [event] = self.events
        assert isinstance(event, PersistEnded)
        answer = event.answer
        assert (answer.job_id, answer.attempt, answer.step) == (
            order.job_id,
            order.attempt,
            order.record.step,
        )
        return answer

    async def failure(self, node: str, order: Persist) -> str:
        event = await self.persist(node, order)
        assert isinstance(event, PersistFailed)
        return event.detail

    def store(self) -> CheckpointStore:
        return CheckpointStore.at(self.url, job="gpt")

    async def checkpoint(self) -> Restore:
        """Return a restore from a checkpoint that ``n0`` wrote as a whole and committed."""
        event = await self.persist("n0", self.order(self.layers))
        assert isinstance(event, LayersPersisted)
        commit(self, [event])
        return Restore(
            job_id="job-2", step=STEP, generation=0, groups=(), sources={}, url=self.url, job_name="gpt"
        )


def commit(hosts: Hosts, written: Sequence[LayersPersisted]) -> None:
    files = [layer for event in written for layer in event.layers]
    store = hosts.store()
    draft = store.begin(STEP, "7")
    store.commit(draft, files, job="gpt", job_id=JOB, vote=None, written_at=1.0, ftd_version="0")


def with_hosts(
    body: Callable[[Hosts], object], *, serving: Sequence[str] = NODES, large: bool = False
) -> None:
    async def main(hosts: Hosts) -> None:
        async with AsyncExitStack() as stack:
            for name in serving:
                node = await stack.enter_async_context(Node(name, hosts.root / name))
                hosts.sources[name] = node.address
            await body(hosts)  # type: ignore[misc]

    with shared_directory() as root:
        (root / "kept").mkdir()
        hosts = Hosts(root=root, url=str(root / "kept"))
        hosts.write((CHUNK_BYTES * 2,) if large else (700, 33, 5000))
        asyncio.run(main(hosts))


# --- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["", "n1", "n2"])
def test_the_shares_of_all_nodes_make_the_checkpoint(lost: str) -> None:
    """It holds also without a node, whose shards are decoded, and from a node that owns nothing of it."""
    writers = [name for name in (*NODES, "newcomer") if name != lost]

    async def body(hosts: Hosts) -> None:
        events = []
        for number, name in enumerate(writers):
            share = [layer for layer in hosts.layers if layer % len(writers) == number]
            events.append(await hosts.persist(name, hosts.order(share)))
            assert isinstance(events[-1], LayersPersisted)
            assert [layer.layer for layer in events[-1].layers] == share
        assert hosts.store().steps() == ()
        commit(hosts, events)
        checkpoint = hosts.store().open()
        assert checkpoint.verify() == ()
        for number, layer in hosts.layers.items():
            header, _, payload = checkpoint.read_layer(number)
            assert (header, payload.tobytes()) == (layer.header, layer.payload.tobytes())

    with_hosts(body, serving=[name for name in NODES if name != lost])


def test_the_writer_of_layer_0_writes_the_description_of_the_model() -> None:
    async def body(hosts: Hosts) -> None:
        hosts.description = encode_description(ModelDescription(aliases={"0.w": ("4.w",)}))
        first = await hosts.persist("n1", hosts.order([1, 2, 3, 4]))
        assert not list((hosts.root / "kept").rglob("description.bin"))
        commit(hosts, [first, await hosts.persist("n0", hosts.order([0]))])
        checkpoint = hosts.store().open()
        assert checkpoint.description().aliases == {"0.w": ("4.w",)} and checkpoint.verify() == ()

    with_hosts(body)


def test_layer_0_waits_for_a_trainer_that_is_still_building_the_model() -> None:
    async def body(hosts: Hosts) -> None:
        persister = hosts.persister("n0")
        persister.set_description("job-0", encode_description(ModelDescription()))
        persister.begin(hosts.order([1]))
        await until_async(lambda: hosts.events)
        hosts.events.clear()
        persister.begin(hosts.order([0], attempt="8"))
        await asyncio.sleep(0.1)
        assert not hosts.events
        persister.set_description(JOB, encode_description(ModelDescription(aliases={"0.w": ("4.w",)})))
        await until_async(lambda: hosts.events)
        await persister.close()
        assert list((hosts.root / "kept").rglob("description.bin"))

    with_hosts(body)


def test_a_description_of_another_job_or_a_malformed_one_is_not_written() -> None:
    async def body(hosts: Hosts) -> None:
        hosts.description = b"nonsense"
        await hosts.checkpoint()
        assert hosts.store().open().description() == ModelDescription()
        persister = hosts.persister("n0", description_timeout_s=0.05)
        persister.set_description("job-0", encode_description(ModelDescription()))
        hosts.events.clear()
        persister.begin(hosts.order([0], attempt="8"))
        await until_async(lambda: hosts.events)
        await persister.close()
        assert not list((hosts.root / "kept").rglob("description.bin"))

    with_hosts(body)


def test_a_flipped_bit_in_memory_does_not_reach_the_disk() -> None:
    async def body(hosts: Hosts) -> None:
        flip(hosts.root / "n0", STEP, "group-0/shard")
        await hosts.checkpoint()
        assert hosts.store().open().read_layer(1)[2].tobytes() == hosts.layers[1].payload.tobytes()
        assert [report[:2] for report in hosts.reports] == [("n0", "group-0/shard")]

    with_hosts(body)


def test_a_stopped_order_feeds_nothing_and_the_next_one_is_written() -> None:
    async def body(hosts: Hosts) -> None:
        hosts.events.clear()
        persister = hosts.persister("n0", rate_bytes_s=1.0)
        persister.set_description(JOB, b"")
        draft = Path(hosts.url) / f".step-{STEP:012d}.8.partial"
        persister.begin(hosts.order([0, 1], "8"))
        await until_async(lambda: draft.exists() and list(draft.iterdir()))
        persister.stop("7")
        persister.stop("8")
        await until_async(lambda: not list(draft.iterdir()))
        assert hosts.events == []
        await persister.close()
        await hosts.checkpoint()
        # Another order ends the one that is being written, and so does the end of the daemon.
        hosts.events.clear()
        persister.begin(hosts.order([0], "9"))
        persister.begin(hosts.order([0], "10"))
        await persister.close()
        assert hosts.events == []

    with_hosts(body, large=True)


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let the kernel allow only small files, as with a full disk or a quota.

    It lasts no longer than needed, since pytest's output may go to a file as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_reported() -> None:
    async def body(hosts: Hosts) -> None:
        with small_files():
            failure = await hosts.failure("n0", hosts.order([0, 1]))
        assert "larger than this process may write" in failure
        assert list((Path(hosts.url) / f".step-{STEP:012d}.7.partial").iterdir()) == []

    with_hosts(body)


def test_an_unwritable_location_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    async def body(hosts: Hosts) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", refuse)
            assert "it is read-only" in await hosts.failure("n0", hosts.order([0]))
        Path(hosts.url).rename(hosts.root / "unmounted")
        assert "it does not exist" in await hosts.failure("n0", hosts.order([0]))
        assert not Path(hosts.url).exists()
        hosts.url = "nosuch://x"
        assert "nosuch" in await hosts.failure("n0", hosts.order([0]))

    with_hosts(body)


@pytest.mark.long
def test_shards_of_a_peer_lost_meanwhile_are_decoded_or_the_loss_is_reported() -> None:
    """Its server stops when the third layer is requested, which is once the first is written."""

    async def body(hosts: Hosts) -> None:
        async with Node("n1", hosts.root / "n1") as one, Node("n2", hosts.root / "n2") as two:
            hosts.sources |= {"n1": one.address, "n2": two.address}
            await lose_behind_first(hosts, [one])
            assert {name for name, _, _ in hosts.reports} == {"n1"}
        async with Node("n1", hosts.root / "n1") as one, Node("n2", hosts.root / "n2") as two:
            hosts.sources |= {"n1": one.address, "n2": two.address}
            assert "n1, n2" in await lose_behind_first(hosts, [one, two])

    async def lose_behind_first(hosts: Hosts, nodes: Sequence[Node]) -> str:
        write = CheckpointStore.write_layer
        loop = asyncio.get_running_loop()

        def then_lose(self: CheckpointStore, draft, layer, *rest):  # type: ignore[no-untyped-def]
            file = write(self, draft, layer, *rest)
            if layer == 0:
                for node in nodes:
                    asyncio.run_coroutine_threadsafe(node.server.close(), loop).result(60)
            return file

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointStore, "write_layer", then_lose)
            event = await hosts.persist("newcomer", hosts.order([0, 1, 2]))
        return event.detail if isinstance(event, PersistFailed) else ""

    with_hosts(body, serving=["n0"])


def test_a_snapshot_released_meanwhile_is_not_written() -> None:
    async def body(hosts: Hosts) -> None:
        write = CheckpointStore.write_layer

        def then_release(self: CheckpointStore, draft, layer, *rest):  # type: ignore[no-untyped-def]
            file = write(self, draft, layer, *rest)
            for manifest in hosts.root.glob(f"*/{JOB}/device-*/step-*.json"):
                manifest.unlink()
            return file

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointStore, "write_layer", then_release)
            assert "are lost" in await hosts.failure("n0", hosts.order([0, 1, 2]))

    with_hosts(body)


# --- reading -----------------------------------------------------------------------------------------


async def read(hosts: Hosts, restore: Restore, layers: Sequence[int]) -> Path:
    directory = hosts.root / f"staged-{len(list(hosts.root.glob('staged-*')))}"
    directory.mkdir()
    size_bytes = await read_checkpoint(restore, layers, StagingDirectory(directory).put)
    assert size_bytes == sum(len(hosts.layers[layer].payload) for layer in layers)
    return directory


def test_a_node_reads_only_the_layers_that_it_needs() -> None:
    async def body(hosts: Hosts) -> None:
        restore = await hosts.checkpoint()
        for layers in ([3, 1], range(5), []):
            directory = await read(hosts, restore, layers)
            assert len(list(directory.glob("layer-*"))) == len(layers)
            for number in layers:
                layer = hosts.layers[number]
                assert payload_of(directory, number) == (layer.header, layer.payload.tobytes(), 0)

    with_hosts(body)


def test_read_errors_name_their_cause() -> None:
    async def body(hosts: Hosts) -> None:
        restore = await hosts.checkpoint()
        directory = Path(hosts.url) / f"step-{STEP:012d}"
        data = bytearray((directory / "layer-0003.bin").read_bytes())
        data[5] ^= 1
        (directory / "layer-0003.bin").write_bytes(data)
        assert await blamed(hosts, restore, [0, 3], "layer-0003.bin: its bytes are not")
        assert len(list((await read(hosts, restore, [0, 4])).iterdir())) == 4
        other = replace(restore, job_name="bert")
        assert await blamed(hosts, other, [0], "of job 'gpt', not of 'bert'")
        assert await blamed(hosts, restore, [5], r"no layers \[5\]")
        (directory / "layer-0001.bin").unlink()
        assert await blamed(hosts, restore, [0], "layer-0001.bin is missing")
        elsewhere = replace(restore, step=STEP + 1)
        assert not await blamed(hosts, elsewhere, [0], "the same for this node")
        Path(hosts.url).rename(hosts.root / "unmounted")
        assert not await blamed(hosts, restore, [0], "it does not exist")

    async def blamed(hosts: Hosts, restore: Restore, layers: Sequence[int], words: str) -> bool:
        with pytest.raises(LayerRestoreError, match=words) as caught:
            await read(hosts, restore, layers)
        return caught.value.corrupt

    with_hosts(body)
