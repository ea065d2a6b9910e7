"""Between ``ResumeTrainer`` with a ``Restore`` and the trainers' frames: their layers are made ready.

In a task of its own, so that heartbeats go on. Each trainer is told as soon as its own layers are there. What
this node's memory has as it is, is lent, and verified by the trainer; where that says that it is no good,
its layers are staged once more, with everything copied and verified here.
"""

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from ftd.snapshots.persist import read_checkpoint
from ftd.snapshots.restoring.restore import DamageTold, LayerRestoreError, Restorer
from ftd.snapshots.restoring.staging import StagingDirectory
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from planner.values import Device, Plan
from statemachine.agent.events import StagingFailed
from statemachine.events import Event
from statemachine.messages.cluster import RestoreFailed, Resume
from statemachine.messages.trainer import StagingCorrupted
from statemachine.messages.values import Restore

log = structlog.get_logger("ftd.node")

Send = Callable[[str], None]
"""Tells a trainer the directory of its staged layers; empty: it has none."""


@dataclass(slots=True, kw_only=True)
class _Trainer:
    layers: frozenset[int]
    send: Send
    told: bool = False
    again: bool = False
    """What was lent to it was no good."""


class TrainerStaging:
    """:param staged: called when all is staged from a snapshot. The others: see ``SnapshotService``."""

    def __init__(
        self,
        *,
        node: str,
        arenas: NodeArenas,
        token: str,
        tls: ssl.SSLContext | None,
        feed: Callable[[Event], None],
        stamp: Callable[[], dict[str, Any]],
        tell: Callable[[str, int], DamageTold],
        staged: Callable[[Restore], None],
    ) -> None:
        self._node, self._arenas, self._token, self._tls = node, arenas, token, tls
        self._feed, self._stamp, self._tell, self._done = feed, stamp, tell, staged
        self._resume: Resume | None = None
        self._directory = Path()
        self._trainers: dict[int, _Trainer] = {}
        """By device: those that have not resumed yet."""
        self._there: set[int] = set()
        """Layers."""
        self._task: asyncio.Task[None] | None = None
        self._job: str | None = None
        """Whose staged layers are there."""

    def resume(self, resume: Resume, device: int, send: Send) -> None:
        """Call ``send`` at once or, where the trainer goes back and has a place, when its layers are there.

        The first device of a generation begins the work, for all devices of the node.
        """
        if resume.restore is None:
            self.clear()
            send("")
        elif Device(node=self._node, index=device) not in resume.plan.devices:
            send("")  # Of another lineage than the plan's, so it drops what it holds.
        else:
            self._add(resume, resume.restore, device, send)

    def _add(self, resume: Resume, restore: Restore, device: int, send: Send) -> None:
        if self._task is None or self._resume is None or resume.generation != self._resume.generation:
            self.clear()
            self._resume = resume
            self._begin(restore, layers_of(resume.plan, self._node), again=False)
        layers = layers_of(resume.plan, self._node, device)
        self._trainers[device] = _Trainer(layers=frozenset(layers), send=send)
        self._tell_trainers()

    def spoiled(self, device: int, said: StagingCorrupted) -> None:
        """A trainer cannot use what it was given."""
        resume, trainer = self._resume, self._trainers.get(device)
        if resume is None or resume.restore is None or trainer is None or not trainer.told:
            return
        if said.generation != resume.generation:
            return
        log.warning("staging_spoiled", device=device, part=said.part, reason=said.detail)
        if said.part:
            self._tell(resume.restore.job_id, resume.restore.step)(self._node, said.part, said.detail)
        if trainer.again:
            self._fail(f"device {device} cannot use what is staged for it: {said.detail}")
            return
        trainer.again, trainer.told = True, False
        self._there -= trainer.layers
        self._begin(resume.restore, sorted(trainer.layers), again=True)

    def resumed(self, device: int, generation: int) -> None:
        """This trainer has read its layers; with the last of them what was staged goes."""
        if self._resume is not None and generation == self._resume.generation and device in self._trainers:
            del self._trainers[device]
            if not self._trainers:
                self.clear()

    def abandon(self) -> None:
        """Nobody waits for what is being staged any more."""
        self._trainers.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def clear(self) -> None:
        """Free what was staged. No trainer reads it any more."""
        self.abandon()
        self._there.clear()
        self._resume = None
        if self._job is not None:
            self._arenas.remove_staging(self._job)
            self._job = None

    async def close(self) -> None:
        """What is staged stays, until another daemon takes stock."""
        task = self._task
        self.abandon()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    # --- the task ----------------------------------------------------------------------------------

    def _begin(self, restore: Restore, layers: Collection[int], *, again: bool) -> None:
        self._task = asyncio.ensure_future(self._stage(self._task, restore, tuple(layers), again))

    async def _stage(
        self, before: asyncio.Task[None] | None, restore: Restore, layers: tuple[int, ...], again: bool
    ) -> None:
        if before is not None:
            await before
        assert self._resume is not None, "it is cancelled before that is forgotten"
        began, generation = time.monotonic(), self._resume.generation
        try:
            if not again:
                self._job = restore.job_id
                self._directory = self._arenas.make_staging(restore.job_id, generation)
            done = await self._put(
                restore, layers, StagingDirectory(self._directory, lends=not again, staged=self._staged)
            )
        except LayerRestoreError as error:
            self._fail(str(error), error.bad, damaged=error.damaged)
        except (OSError, ValueError) as error:
            self._fail(f"layers cannot be staged in {self._arenas.root}: {error}")
        except Exception as error:
            # A bug of ours: said, and tried again like any other failure, instead of waiting for ever.
            log.exception("stage", generation=generation)
            self._fail(f"an internal error: {type(error).__name__}: {error}")
        else:
            log.info(
                "staged",
                generation=generation,
                step=restore.step,
                layers=len(layers),
                again=again,
                **done,
                took_s=round(time.monotonic() - began, 3),
            )

    async def _put(
        self, restore: Restore, layers: tuple[int, ...], stage: StagingDirectory
    ) -> dict[str, int]:
        """What it took, for the log."""
        if restore.url:
            return {"checkpoint_bytes": await read_checkpoint(restore, layers, stage.put)}
        async with ShardClient(self._token, tls=self._tls) as client:
            restorer = Restorer(
                restore=restore,
                node=self._node,
                arenas=self._arenas,
                client=client,
                tell=self._tell(restore.job_id, restore.step),
            )
            done = await restorer.run(layers, stage)
            # At once: when the trainers have resumed this task is over.
            self._done(restore)
            return dataclasses.asdict(done)

    def _staged(self, layer: int) -> None:
        self._there.add(layer)
        self._tell_trainers()

    def _tell_trainers(self) -> None:
        for trainer in self._trainers.values():
            if not trainer.told and trainer.layers <= self._there:
                trainer.told = True
                trainer.send(str(self._directory))

    def _fail(self, detail: str, bad: tuple[str, ...] = (), *, damaged: bool = False) -> None:
        assert self._resume is not None, "there is nothing that can fail"
        generation = self._resume.generation
        log.warning("stage", generation=generation, reason=detail, bad=bad)
        self._trainers.clear()
        failure = RestoreFailed(generation=generation, detail=detail, bad=bad, damaged=damaged)
        self._feed(StagingFailed(**self._stamp(), failure=failure))


def layers_of(plan: Plan, node: str, device: int | None = None) -> tuple[int, ...]:
    """All layers that devices of this node hold under the plan, or one of them; ascending."""
    layers = {
        layer
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if any(one.node == node and device in (None, one.index) for one in stage.devices)
        for layer in range(stage.first_layer, stage.end_layer)
    }
    return tuple(sorted(layers))
