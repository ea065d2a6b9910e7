"""Persistent checkpoints on a node: writing its share of one from memory, and reading its layers from one.

Writing runs next to training. A layer is assembled as for a rollback (``ftd.snapshots.restoring.restore``)
while the one before is written, at the configured rate, in threads of low priority. The coordinator sees to
it that the snapshot stays meanwhile (``RetainSnapshot``), and the node checks that it did. The coordinator
commits what all nodes wrote, or abandons it.
"""

import asyncio
import contextlib
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from ftd.driver import Driver
from ftd.snapshots.ports import CheckpointWriting
from ftd.snapshots.restoring.holders import ReportCorruption
from ftd.snapshots.restoring.restore import LayerRestoreError, Restorer
from ftd.snapshots.restoring.staging import LayerStream, PutLayer
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.tasks import run_all
from statemachine.agent.events import PersistEnded
from statemachine.messages.cluster import LayersPersisted, Persist, PersistFailed
from statemachine.messages.values import LayerFile, Restore
from storage.checkpoint import Checkpoint, CheckpointDraft, CheckpointStore
from storage.description import decode_description
from storage.errors import CheckpointMissingError, CorruptDataError, ForeignCheckpointError, StorageError
from storage.rate_limit import RateLimiter
from storage.shards import Bytes

log = structlog.get_logger("ftd.node")

_NICENESS = 10
"""Niceness of the threads that write: training goes first."""
_READERS = 4
"""Number of layers that are read at once; each takes its memory."""
T = TypeVar("T")


class Persister:
    """The writer of this node's share of persistent checkpoints, one checkpoint at a time.

    :param rate_bytes_s: rate limit of the writes; ``None`` for no limit.
    :param report_corruption: returns, for a job and a step, the callback for corruption in that snapshot.
    """

    def __init__(
        self,
        *,
        writing: CheckpointWriting,
        rate_bytes_s: float | None,
        driver: Driver,
        report_corruption: Callable[[str, int], ReportCorruption],
        description_timeout_s: float = 60.0,
    ) -> None:
        """Create the persister of a node.

        :param description_timeout_s: longest time for which layer 0 waits for the description of its model.
            A daemon that has restarted holds snapshots before its trainer has built the model.
        """
        self._writing, self._rate_bytes_s = writing, rate_bytes_s
        self._driver, self._report_corruption = driver, report_corruption
        self._order: Persist | None = None
        self._flow = RateLimiter()
        self._description: tuple[str, bytes] = ("", b"")
        self._described = asyncio.Event()
        self._description_timeout_s = description_timeout_s
        self._task: asyncio.Task[None] | None = None

    def set_description(self, job_id: str, description: bytes) -> None:
        """Write this description into checkpoints of the job, together with layer 0 if this node writes it.

        :param description: the encoded description; empty if the model has none.
        """
        left_out: tuple[str, ...] = ()
        try:
            if description:
                left_out = decode_description(description, "the description of the model").left_out
        except CorruptDataError as error:
            log.warning("description_invalid", job=job_id, reason=str(error))
            description = b""
        if left_out:
            log.warning(
                "description_incomplete",
                job=job_id,
                reason="files are too large to be included",
                files=left_out,
            )
        self._description = job_id, description
        self._described.set()

    def begin(self, order: Persist) -> None:
        """Start to write, and feed ``PersistEnded`` when it ends. An earlier order is abandoned."""
        self.stop()
        self._order, self._flow = order, RateLimiter(self._rate_bytes_s)
        self._task = asyncio.ensure_future(self._work(order, self._flow))

    def stop(self, attempt: str | None = None) -> None:
        """Stop writing, this attempt or any; nothing is fed any more."""
        if self._task is not None and self._order is not None and attempt in (None, self._order.attempt):
            self._flow.cancel()
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Stop without waiting for a disk that does not answer."""
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _work(self, order: Persist, flow: RateLimiter) -> None:
        description = await self._description_for(order)
        began = self._driver.now()
        try:
            layers = await self._writing.write(
                order,
                description,
                flow,
                self._report_corruption(order.job_id, order.record.step),
            )
        except (LayerRestoreError, StorageError) as error:
            self._fail(order, str(error))
        except (
            Exception
        ) as error:  # Whatever it is, the coordinator waits for an answer, and training goes on.
            self._fail(order, f"{type(error).__name__}: {error}")
        else:
            took_s = round(self._driver.now() - began, 3)
            size_bytes = sum(layer.size_bytes for layer in layers)
            log.info(
                "persisted", attempt=order.attempt, layers=len(layers), size_bytes=size_bytes, took_s=took_s
            )
            written = LayersPersisted(
                job_id=order.job_id,
                attempt=order.attempt,
                step=order.record.step,
                layers=tuple(layers),
                took_s=took_s,
            )
            self._driver.feed(PersistEnded(**self._driver.stamp(), answer=written))

    async def _description_for(self, order: Persist) -> bytes:
        """Return the description of the order's model, or nothing if it is not needed or does not arrive."""
        if 0 not in order.layers:
            return b""
        try:
            async with asyncio.timeout(self._description_timeout_s):
                while self._description[0] != order.job_id:
                    self._described.clear()
                    await self._described.wait()
        except TimeoutError:
            log.warning(
                "description_missing",
                job=order.job_id,
                attempt=order.attempt,
                reason=f"no trainer of this node has described the model within {self._description_timeout_s:g} s",
            )
            return b""
        return self._description[1]

    def _fail(self, order: Persist, detail: str) -> None:
        log.warning("persist_failed", attempt=order.attempt, step=order.record.step, reason=detail)
        failed = PersistFailed(
            job_id=order.job_id, attempt=order.attempt, step=order.record.step, detail=detail
        )
        self._driver.feed(PersistEnded(**self._driver.stamp(), answer=failed))


class CheckpointWriter:
    """The writing of layers from the memory of nodes (``ftd.snapshots.ports.CheckpointWriting``)."""

    def __init__(
        self, *, node: str, arenas: NodeArenas, token: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._node, self._arenas, self._token, self._tls = node, arenas, token, tls

    async def write(
        self, order: Persist, description: bytes, flow: RateLimiter, report_corruption: ReportCorruption
    ) -> list[LayerFile]:
        """Assemble each layer while the one before is written."""
        written: list[LayerFile] = []
        store, draft = await run_in_thread(lambda: _begin(order))
        if description and 0 in order.layers:
            await run_in_thread(partial(store.write_description, draft, description), _NICENESS)
        under_way: asyncio.Task[LayerFile] | None = None

        async def settle() -> None:
            if under_way is not None:
                written.append(await under_way)

        async def put(layer: int, header: bytes, payload: Bytes) -> None:
            nonlocal under_way
            await settle()
            write = partial(store.write_layer, draft, layer, header, [payload], flow)
            under_way = asyncio.ensure_future(run_in_thread(write, _NICENESS))

        record = order.record
        async with ShardClient(self._token, tls=self._tls) as client:
            restorer = Restorer(
                restore=Restore(
                    job_id=order.job_id,
                    step=record.step,
                    generation=record.generation,
                    groups=record.groups,
                    sources=order.sources,
                ),
                node=self._node,
                arenas=self._arenas,
                client=client,
                report_corruption=report_corruption,
            )
            try:
                await restorer.run(order.layers, LayerStream(put))
                await settle()
            except BaseException:
                flow.cancel()
                if under_way is not None:  # Do not wait for a disk that does not answer.
                    under_way.cancel()
                    await asyncio.gather(under_way, return_exceptions=True)
                raise
        return written


def _begin(order: Persist) -> tuple[CheckpointStore, CheckpointDraft]:
    store = CheckpointStore.at(order.url, job=order.job_name)
    return store, store.begin(order.record.step, order.attempt)


async def read_checkpoint(restore: Restore, layers: Sequence[int], put: PutLayer) -> int:
    """Read each of ``layers`` from the persistent checkpoint that ``restore`` names, and return their bytes.

    What ``put`` raises ends the reading.

    :raises LayerRestoreError: they cannot be read; ``corrupt`` if the checkpoint itself is the cause.
    """
    size_bytes, left = 0, iter(layers)

    async def read(checkpoint: Checkpoint) -> None:
        nonlocal size_bytes
        for layer in left:
            header, _, payload = await run_in_thread(partial(checkpoint.read_layer, layer))
            await put(layer, header, payload)
            size_bytes += len(payload)

    try:
        checkpoint = await run_in_thread(lambda: _open(restore, layers))
        await run_all(read(checkpoint) for _ in range(_READERS))
    except CheckpointMissingError as error:
        # The coordinator found it there, so the checkpoint is not at fault.
        hint = "check that this location is the same for this node and the coordinator"
        raise LayerRestoreError(f"{error}; {hint}") from None
    except StorageError as error:
        damaged = isinstance(error, CorruptDataError | ForeignCheckpointError)
        raise LayerRestoreError(f"the checkpoint of step {restore.step}: {error}", corrupt=damaged) from None
    return size_bytes


def _open(restore: Restore, layers: Sequence[int]) -> Checkpoint:
    checkpoint = CheckpointStore.at(restore.url, job=restore.job_name).open(restore.step)
    if missing := [layer for layer in layers if layer >= len(checkpoint.manifest.layers)]:
        raise ForeignCheckpointError(f"it has no layers {missing}")
    return checkpoint


async def run_in_thread(work: Callable[[], T], niceness: int = 0) -> T:
    """Run ``work`` in a thread that nobody waits for when the daemon ends: a network disk may never answer."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return  # The caller was cancelled.
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            if niceness:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            result = work()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # The loop may be closed.
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return await done
