"""Staging of layers for trainers that resume from a snapshot or a checkpoint.

Staging runs in a task of its own, so that heartbeats go on. Each trainer gets its directory as soon as its
own layers are staged. Bytes that this node's memory holds unchanged are borrowed from the snapshot and
verified by the trainer. If a trainer finds them corrupt, its layers are staged once more, with everything
copied and verified here.
"""

import asyncio
import dataclasses
import ssl
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from ftd.driver import Driver
from ftd.snapshots.persist import read_checkpoint
from ftd.snapshots.ports import StagingOperations
from ftd.snapshots.restoring.holders import ReportCorruption
from ftd.snapshots.restoring.restore import LayerRestoreError, Restorer
from ftd.snapshots.restoring.staging import StagingDirectory
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from planner.values import Device, Plan
from statemachine.agent.events import StagingFailed
from statemachine.messages.cluster import RestoreFailed, Resume
from statemachine.messages.trainer import StagingCorrupted
from statemachine.messages.values import Restore

log = structlog.get_logger("ftd.node")

Send = Callable[[str], None]
"""Function that sends a trainer the directory of its staged layers; empty if it has none."""


@dataclass(slots=True, kw_only=True)
class _Trainer:
    layers: frozenset[int]
    send: Send
    informed: bool = False
    retry: bool = False
    """Whether the layers are being staged a second time, without borrowed bytes."""


class LayerStaging:
    """Staging from the memory of nodes, or from a checkpoint (``ftd.snapshots.ports.StagingOperations``)."""

    def __init__(self, *, node: str, arenas: NodeArenas, token: str, tls: ssl.SSLContext | None) -> None:
        self._node, self._arenas, self._token, self._tls = node, arenas, token, tls
        self.root = arenas.root
        self.make_staging, self.remove_staging = arenas.make_staging, arenas.remove_staging

    async def stage(
        self,
        restore: Restore,
        layers: Sequence[int],
        directory: Path,
        *,
        borrows: bool,
        on_layer: Callable[[int], None],
        on_staged: Callable[[], None],
        report_corruption: ReportCorruption,
    ) -> dict[str, int]:
        """Read the layers from the checkpoint that ``restore`` names, or else from memory."""
        target = StagingDirectory(directory, borrows=borrows, staged=on_layer)
        if restore.url:
            return {"checkpoint_bytes": await read_checkpoint(restore, layers, target.put)}
        async with ShardClient(self._token, tls=self._tls) as client:
            restorer = Restorer(
                restore=restore,
                node=self._node,
                arenas=self._arenas,
                client=client,
                report_corruption=report_corruption,
            )
            done = await restorer.run(layers, target)
            # Called here because the last trainer's resume cancels the caller's task.
            on_staged()
            return dataclasses.asdict(done)


class TrainerStaging:
    """The staging of layers for this node's trainers.

    :param on_staged: called when everything was staged from a snapshot. ``SnapshotService`` describes the
        other parameters.
    """

    def __init__(
        self,
        *,
        node: str,
        operations: StagingOperations,
        driver: Driver,
        report_corruption: Callable[[str, int], ReportCorruption],
        on_staged: Callable[[Restore], None],
    ) -> None:
        self._node, self._operations, self._driver = node, operations, driver
        self._report_corruption, self._on_staged = report_corruption, on_staged
        self._resume: Resume | None = None
        self._directory = Path()
        self._trainers: dict[int, _Trainer] = {}
        """Trainers that have not resumed yet, by device."""
        self._staged_layers: set[int] = set()
        """Layers that are staged."""
        self._task: asyncio.Task[None] | None = None
        self._job: str | None = None
        """Job whose staged layers are there."""

    def resume(self, resume: Resume, device: int, send: Send) -> None:
        """Call ``send`` at once or, if the trainer rolls back and is part of the plan, when its layers are
        staged.

        The first device of a generation starts the work for all devices of the node.
        """
        if resume.restore is None:
            self.clear()
            send("")
        elif Device(node=self._node, index=device) not in resume.plan.devices:
            send("")  # It is of another lineage than the plan, so it drops its state.
        else:
            self._add(resume, resume.restore, device, send)

    def _add(self, resume: Resume, restore: Restore, device: int, send: Send) -> None:
        if self._task is None or self._resume is None or resume.generation != self._resume.generation:
            self.clear()
            self._resume = resume
            self._begin(restore, layers_of(resume.plan, self._node), retry=False)
        layers = layers_of(resume.plan, self._node, device)
        self._trainers[device] = _Trainer(layers=frozenset(layers), send=send)
        self._inform_trainers()

    def handle_corrupt(self, device: int, report: StagingCorrupted) -> None:
        """Handle a trainer's report that it cannot use what was staged."""
        resume, trainer = self._resume, self._trainers.get(device)
        if resume is None or resume.restore is None or trainer is None or not trainer.informed:
            return
        if report.generation != resume.generation:
            return
        log.warning("staging_corrupt", device=device, part=report.part, reason=report.detail)
        if report.part:
            self._report_corruption(resume.restore.job_id, resume.restore.step)(
                self._node, report.part, report.detail
            )
        if trainer.retry:
            self._fail(f"device {device} cannot use its staged layers: {report.detail}")
            return
        trainer.retry, trainer.informed = True, False
        self._staged_layers -= trainer.layers
        self._begin(resume.restore, sorted(trainer.layers), retry=True)

    def resumed(self, device: int, generation: int) -> None:
        """Note that this trainer has read its layers; after the last trainer the staged layers are removed."""
        if self._resume is not None and generation == self._resume.generation and device in self._trainers:
            del self._trainers[device]
            if not self._trainers:
                self.clear()

    def abandon(self) -> None:
        """Stop staging: no trainer waits for it any more."""
        self._trainers.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def clear(self) -> None:
        """Remove what was staged; no trainer reads it any more."""
        self.abandon()
        self._staged_layers.clear()
        self._resume = None
        if self._job is not None:
            self._operations.remove_staging(self._job)
            self._job = None

    async def close(self) -> None:
        """Stop staging. What is staged stays until another daemon starts."""
        task = self._task
        self.abandon()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    # --- the task ----------------------------------------------------------------------------------

    def _begin(self, restore: Restore, layers: Collection[int], *, retry: bool) -> None:
        self._task = asyncio.ensure_future(self._stage(self._task, restore, tuple(layers), retry))

    async def _stage(
        self, before: asyncio.Task[None] | None, restore: Restore, layers: tuple[int, ...], retry: bool
    ) -> None:
        if before is not None:
            await before
        assert self._resume is not None, "the task is cancelled before the resume is dropped"
        began, generation = self._driver.now(), self._resume.generation
        try:
            if not retry:
                self._job = restore.job_id
                self._directory = self._operations.make_staging(restore.job_id, generation)
            done = await self._operations.stage(
                restore,
                layers,
                self._directory,
                borrows=not retry,
                on_layer=self._on_layer_staged,
                on_staged=lambda: self._on_staged(restore),
                report_corruption=self._report_corruption(restore.job_id, restore.step),
            )
        except LayerRestoreError as error:
            self._fail(str(error), error.bad, corrupt=error.corrupt)
        except (OSError, ValueError) as error:
            self._fail(f"layers cannot be staged in {self._operations.root}: {error}")
        except Exception as error:
            # An internal error is reported and retried like any other failure, since the trainers would
            # wait forever.
            log.exception("staging_failed", generation=generation)
            self._fail(f"an internal error: {type(error).__name__}: {error}")
        else:
            log.info(
                "staged",
                generation=generation,
                step=restore.step,
                layers=len(layers),
                retry=retry,
                **done,
                took_s=round(self._driver.now() - began, 3),
            )

    def _on_layer_staged(self, layer: int) -> None:
        self._staged_layers.add(layer)
        self._inform_trainers()

    def _inform_trainers(self) -> None:
        for trainer in self._trainers.values():
            if not trainer.informed and trainer.layers <= self._staged_layers:
                trainer.informed = True
                trainer.send(str(self._directory))

    def _fail(self, detail: str, bad: tuple[str, ...] = (), *, corrupt: bool = False) -> None:
        assert self._resume is not None, "only a running staging can fail"
        generation = self._resume.generation
        log.warning("staging_failed", generation=generation, reason=detail, bad=bad)
        self._trainers.clear()
        failure = RestoreFailed(generation=generation, detail=detail, bad=bad, corrupt=corrupt)
        self._driver.feed(StagingFailed(**self._driver.stamp(), failure=failure))


def layers_of(plan: Plan, node: str, device: int | None = None) -> tuple[int, ...]:
    """Return the layers that devices of this node, or one of them, hold under the plan, in ascending order."""
    layers = {
        layer
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if any(one.node == node and device in (None, one.index) for one in stage.devices)
        for layer in range(stage.first_layer, stage.end_layer)
    }
    return tuple(sorted(layers))
