"""The coordinator's part in ZeRO-1: choosing the step from reports, and knowing which rank has which parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from planner.values import StatePart
from runtime.layers.world import owners_of_layer
from runtime.zero.cells import owned_parts, replica_parts
from statemachine.messages import trainer as p
from statemachine.messages.values import Vote
from tests.helpers.harness import Cluster, TrainerHandle

Pipelines = tuple[p.WorldPipeline, ...]


@dataclass(slots=True, kw_only=True)
class Sharded:
    """A controller of trainers that divide the optimizer's state."""

    cluster: Cluster
    job: p.TrainingData
    protection: str = "none"
    ranks: list[TrainerHandle] = field(default_factory=list)
    pipelines: Pipelines = ()
    reports: dict[int, p.TrainerQuiesced] = field(default_factory=dict)
    """Reports by device."""

    def join(self, count: int) -> list[TrainerHandle]:
        new = self.cluster.fork(count)
        self.cluster.prepare(new, self.job)
        return new

    def quiesce(self, trainers: Sequence[TrainerHandle], mode: str = "abort") -> tuple[int, Vote | None]:
        """Quiesce the trainers; return the step that all must reach, and its vote."""
        reports = self.cluster.quiesce(trainers, mode)
        self.reports = {t.device: r for t, r in zip(trainers, reports, strict=True)}
        best = max(reports, key=lambda report: report.committed_step)
        return best.committed_step, best.vote

    def resume(
        self,
        ranks: Sequence[TrainerHandle],
        pipelines: Pipelines,
        step: int,
        vote: Vote | None,
        **more: Any,
    ) -> None:
        before = {trainer.device: rank for rank, trainer in enumerate(self.ranks)}
        held = [
            part
            for rank, trainer in enumerate(ranks)
            for part in held_of(
                self.reports[trainer.device],
                rank,
                step,
                self.pipelines,
                before.get(trainer.device, -1),
                zero1=self.job.zero1,
            )
        ]
        for rank, trainer in enumerate(ranks):
            frame = self.cluster.resume_frame(rank, len(ranks), pipelines, step, vote)
            world = msgspec.structs.replace(frame.world, held_parts=tuple(held))
            trainer.send(msgspec.structs.replace(frame, world=world, protection=self.protection, **more))
        self.ranks, self.pipelines = list(ranks), pipelines

    def start(self, ranks: Sequence[TrainerHandle], pipelines: Pipelines) -> None:
        self.resume(ranks, pipelines, *self.quiesce(ranks))


def held_of(
    report: p.TrainerQuiesced, rank: int, step: int, pipelines: Pipelines, was: int, *, zero1: bool = True
) -> list[p.PartData]:
    """Return the parts at ``step`` of the trainer that was rank ``was`` of ``pipelines`` and is rank ``rank``
    of the next world.
    """
    if report.committed_step == step:
        counted, held = list(report.parts), set(report.held)
    elif report.ready_step == step:
        world = p.WorldData(pipelines=pipelines, transfers=(), hosts=())
        owned = {
            StatePart(layer=layer, start=start, end=end, of=of, replica=replica)
            for layer in {one.layer for one in report.parts}
            if was in owners_of_layer(world).get(layer, ())
            for parts, replica in (
                (owned_parts(world, was, layer, zero1=zero1), False),
                (replica_parts(world, was, layer) if zero1 else (), True),
            )
            for start, end, of in parts
        }
        counted = [one for one in report.parts if one in owned]
        held = set()
    else:
        return []
    return [
        p.PartData(
            rank=rank,
            layer=one.layer,
            start=one.start,
            end=one.end,
            of=one.of,
            replica=one.replica,
            whole=one.layer in held,
        )
        for one in counted
    ]
