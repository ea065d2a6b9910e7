"""Tests of exports of checkpoints for ``from_pretrained``: when they begin, and that nothing waits for them in
vain.
"""

from typing import Any

from msgspec.structs import replace

from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import CommitCheckpoint, ExportCheckpoint
from statemachine.events import (
    BrokerConnected,
    CheckpointCommitted,
    ExportCompleted,
    ExportFailed,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.timing import Timing
from tests.helpers.writing import NODES, Writing, all_done


class Exporting(Writing):
    """A job with a checkpoint every fourth step, of which the first one after every eighth step is exported."""

    def feed(self, kind: Any, **values: Any) -> list[Any]:
        if kind is SubmitRequested:
            job = values["job"]
            policy = replace(job.checkpoint, huggingface_every_steps=8, huggingface_directory="/exports")
            values["job"] = replace(job, checkpoint=policy)
        return super().feed(kind, **values)

    def exports(self) -> list[int]:
        return [effect.step for effect in self.all(ExportCheckpoint)]

    def exported(self, step: int) -> None:
        self.feed(
            ExportCompleted,
            job_id="job-1",
            step=step,
            directory=f"/exports/{step}",
            size_bytes=9,
            took_s=1.0,
        )

    def failed(self, step: int) -> None:
        self.feed(ExportFailed, job_id="job-1", step=step, detail="the disk is full")


def test_the_first_checkpoint_far_enough_after_the_last_export_is_exported() -> None:
    s = Exporting()
    s.train()
    s.written(5)
    assert s.exports() == []
    s.written(9)
    assert s.exports() == [9]
    s.exported(9)
    (event,) = s.events("CheckpointExported")
    assert (event.step, event.details) == (9, {"directory": "/exports/9", "size_bytes": 9, "took_s": 1.0})
    s.written(13)
    assert s.exports() == []
    s.written(17)
    assert s.exports() == [17]


def test_one_is_exported_at_a_time_and_a_failure_is_an_event() -> None:
    s = Exporting()
    s.train()
    s.written(9)
    assert s.exports() == [9]
    s.written(17)
    assert s.exports() == []
    s.failed(9)
    (event,) = s.events("CheckpointExportFailed")
    assert (event.reason, event.step, event.details) == ("the disk is full", 9, {"directory": "/exports"})
    assert s.exports() == [17]
    s.exported(9)
    assert not s.events("CheckpointExported")
    s.failed(9)
    assert not s.events("CheckpointExportFailed")
    s.exported(17)
    assert s.events("CheckpointExported")


def finish(s: Exporting) -> None:
    """Let the last of 12 steps be written, so that only its export is missing."""
    s.train(steps=12)
    s.written(9)
    s.exported(9)
    all_done(s, 12)
    for name in NODES:
        s.complete(name, 12)
    for node, order in s.orders().items():
        s.wrote(order, node)
    s.feed(CheckpointCommitted, attempt=s.one(CommitCheckpoint).attempt, step=12, pruned=())
    assert s.exports() == [12] and not s.events("JobFinished")


def test_the_jobs_end_waits_for_the_export_of_the_last_step() -> None:
    s = Exporting()
    finish(s)
    s.exported(12)
    assert s.events("CheckpointExported") and s.events("JobFinished")


def test_a_job_ends_although_its_last_step_cannot_be_exported() -> None:
    s = Exporting()
    finish(s)
    s.failed(12)
    assert s.events("CheckpointExportFailed") and s.events("JobFinished")
    s = Exporting()
    finish(s)
    s.fire("finish", after_s=s.due["finish"] - s.now)
    assert "after the last step" in s.events("CheckpointExportFailed")[0].reason
    assert s.events("JobFinished") and not s.events("CheckpointAbandoned")


def taken_over(s: Exporting) -> list[int]:
    """Return the steps that the next coordinator exports at once."""
    machine, effects = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.machine = machine
    s.took(effects)
    begun = s.exports()
    for kind, values in ((TemplatesReady, {"job_id": "job-1"}), (BrokerConnected, {})):
        s.feed(kind, **values)
        begun += s.exports()
    return begun


def test_a_coordinator_that_takes_over_repeats_exports_of_unknown_outcome() -> None:
    s = Exporting()
    s.train()
    s.written(9)
    s.exported(9)
    s.written(17)
    assert taken_over(s) == [17]
    s.exported(17)
    assert taken_over(s) == []


def test_an_export_of_another_job_is_ignored() -> None:
    s = Exporting()
    s.train()
    s.written(9)
    values = {"directory": "/exports/9", "size_bytes": 9, "took_s": 1.0}
    s.feed(ExportCompleted, job_id="job-0", step=9, **values)
    assert not s.events("CheckpointExported")
    s.exported(9)
    assert s.events("CheckpointExported")
