"""The change of an interval of snapshots or checkpoints: journaled with the job, reported, and published."""

from typing import Any, Literal

from msgspec.structs import replace

from planner.intervals import IntervalChoice
from statemachine.cluster.state import Cluster


def change_interval(
    c: Cluster,
    choice: IntervalChoice,
    settled: bool,
    event: Literal["SnapshotIntervalChosen", "CheckpointIntervalChosen"],
    **figures: Any,
) -> None:
    """Let the job continue with the chosen interval of snapshots or of checkpoints.

    :param settled: whether the interval so far was chosen from measurements too; if it was and stays, nothing
        is reported.
    :param event: event that reports the interval.
    :param figures: measurements and assumptions of the choice, for the event.
    """
    job = c.current_job
    of_snapshots = event == "SnapshotIntervalChosen"
    policy = job.snapshot if of_snapshots else job.checkpoint
    if choice.every_steps == policy.every_steps and settled:
        return
    changed = replace(policy, every_steps=choice.every_steps)
    c.job = replace(job, snapshot=changed) if of_snapshots else replace(job, checkpoint=changed)
    c.persist()
    c.emit(
        event,
        choice.reason,
        every_steps=choice.every_steps,
        before=policy.every_steps,
        **figures,
        lost_share=round(choice.lost_share, 6),
    )
    c.publish()
