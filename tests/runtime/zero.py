"""What a coordinator does for ZeRO-1: from reports to the step, and to who has which parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from runtime import protocol as p
from runtime.parts import pipeline_of
from tests.runtime.harness import Cluster, TrainerHandle

Pipelines = tuple[p.PipelineData, ...]


@dataclass(slots=True, kw_only=True)
class Sharded:
    """Drives trainers that share the optimizer's state out."""

    cluster: Cluster
    job: p.TrainingData
    protection: str = "none"
    ranks: list[TrainerHandle] = field(default_factory=list)
    pipelines: Pipelines = ()
    reports: dict[int, p.Quiesced] = field(default_factory=dict)
    """By device."""

    def join(self, count: int) -> list[TrainerHandle]:
        new = self.cluster.fork(count)
        self.cluster.prepare(new, self.job)
        return new

    def quiesce(
        self, trainers: Sequence[TrainerHandle], mode: str = "abort"
    ) -> tuple[int, p.VoteData | None]:
        """The step that all are to be at, and its vote."""
        reports = self.cluster.quiesce(trainers, mode)
        self.reports = {t.device: r for t, r in zip(trainers, reports, strict=True)}
        best = max(reports, key=lambda report: report.committed_step)
        return best.committed_step, best.vote

    def resume(
        self,
        ranks: Sequence[TrainerHandle],
        pipelines: Pipelines,
        step: int,
        vote: p.VoteData | None,
        **more: object,
    ) -> None:
        held = [part for rank, trainer in enumerate(ranks) for part in self._held(rank, trainer, step)]
        for rank, trainer in enumerate(ranks):
            frame = self.cluster.resume_frame(rank, len(ranks), pipelines, step, vote)
            trainer.send(replaced(frame, held, protection=self.protection, **more))
        self.ranks, self.pipelines = list(ranks), pipelines

    def start(self, ranks: Sequence[TrainerHandle], pipelines: Pipelines) -> None:
        self.resume(ranks, pipelines, *self.quiesce(ranks))

    def _held(self, rank: int, trainer: TrainerHandle, step: int) -> list[p.PartData]:
        report = self.reports[trainer.device]
        if report.committed_step == step:
            return [part_data(rank, part, part.layer in report.held) for part in report.parts]
        if report.ready_step != step:
            return []
        # It applies what it holds the gradients of: its layers under the last plan, as that shares them out.
        world = p.WorldData(pipelines=self.pipelines, transfers=(), hosts=())
        parts = len(self.pipelines)
        part = pipeline_of(world, self.ranks.index(trainer))
        owned = {(part, parts, False), ((part + 1) % parts, parts, True)}
        return [
            part_data(rank, one, whole=False)
            for one in report.parts
            if (one.part, one.parts, one.replica) in owned
        ]

    def covered(self) -> bool:
        """Whether those who reported have all of every layer."""
        have: dict[int, set[tuple[int, int]]] = {}
        for report in self.reports.values():
            for part in report.parts:
                have.setdefault(part.layer, set()).add((part.part, part.parts))
        return all(
            any({(n, parts) for n in range(parts)} <= having for _, parts in having)
            for having in have.values()
        )


def part_data(rank: int, part: p.StatePartData, whole: bool) -> p.PartData:
    return p.PartData(
        rank=rank, layer=part.layer, part=part.part, parts=part.parts, replica=part.replica, whole=whole
    )


def replaced(frame: p.Resume, held: Sequence[p.PartData], **more: object) -> p.Resume:
    world = msgspec.structs.replace(frame.world, held_parts=tuple(held))
    return msgspec.structs.replace(frame, world=world, **more)
