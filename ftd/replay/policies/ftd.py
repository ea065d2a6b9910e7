"""``ftd``: this system, with its real cluster machine and its real planner in virtual time.

Every change goes through the coordinator's state machine (``ftd.replay.virtual_cluster``): a loss is detected,
survivors stop and report, the planner compares layouts by what they cost until the next failure, the group forms
and state moves; nodes that come or announce their end are taken in or out at a step boundary. If no copy of a layer
is alive, the newest snapshot in host memory that can be decoded is restored, or else the newest persistent
checkpoint.

Assumptions: an aborted step is computed again (a step that some rank has committed rolls forward in reality); the
durations of the phases are constants, measured on real recoveries; state moves at the rate of one device's link, the
busiest device first (``planner.changes.tradeoff``); the time of a step is the planner's estimate; training stops for
as long as a snapshot or checkpoint delays it, at its beginning.

``keep_gradients`` estimates what ftd does not do: pipelines that have lost no node keep the gradients of the
microbatches that they have completed. The estimate takes all stages of a pipeline for equally long. It does not count
the time in which gradients follow their layers to other nodes, and a loss during a recovery takes none of them.
"""

import math
from collections.abc import Collection, Sequence

from ftd.replay.job import ReplayJob
from ftd.replay.policies.pauses import total_s
from ftd.replay.policy import (
    Change,
    Checkpoints,
    Pause,
    PolicyExcluded,
    Reaction,
    RecoveryPolicy,
    Running,
)
from ftd.replay.virtual_cluster import COMMIT_DELAY_S, FtdParameters, Segment, VirtualCluster
from planner.values import PipelinePlacement, Plan


class FtdPolicy(RecoveryPolicy):
    """This system, with its real cluster machine and its real planner."""

    name = "ftd"

    def __init__(self, job: ReplayJob, parameters: FtdParameters) -> None:
        """:raises PolicyExcluded: the job is of a kind that the virtual cluster does not have."""
        if job.policy.zero1:
            raise PolicyExcluded("optimizer state in parts (ZeRO-1) is not replayed")
        self._parameters = parameters
        self._job = job
        self._cluster = VirtualCluster(job, parameters)
        self._present = 0

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on the first nodes; it waits if they are too few."""
        self._cluster.start(nodes)
        self._present = len(nodes)
        running = self._running()
        self._wake(running_since_s=0.0)
        return Reaction(running=running)

    def change(self, change: Change) -> Reaction | None:
        """Return how the cluster recovers from a change, or goes on after it."""
        cluster, before = self._cluster, self._cluster.plan
        present, self._present = self._present, len(change.nodes)
        cluster.now = change.at_s
        cluster.committed(change.iterations, change.at_s + change.boundary_s)
        cluster.leave(change.leaving)
        cluster.lose(change.removed)
        cluster.add(change.added)
        segments = self._follow(change)
        if cluster.failed:
            return self._submit_again(change, segments)
        after_s = segments.pop(0).seconds if segments and segments[0].use == "running" else 0.0
        pauses = _pauses(segments)
        if cluster.plan is not None and cluster.plan is before and not pauses:
            self._wake(running_since_s=change.at_s + change.boundary_s - before.estimated_iteration_s)
            # Only the share of the present nodes that the plan uses may have changed.
            return None if present == self._present else Reaction(running=self._running())
        self._wake(running_since_s=cluster.now)
        lost = change.running and not after_s
        return Reaction(
            pauses=pauses,
            running=self._running(),
            undo="iteration" if lost else "nothing",
            kept_share=self._kept_share(before, change) if lost and self._parameters.keep_gradients else 0.0,
            keep_iterations=cluster.take_rollback(),
            after_s=after_s,
        )

    def _kept_share(self, before: Plan | None, change: Change) -> float:
        """Return the share of the next iteration that need not be computed if gradients are kept."""
        if before is None or self._cluster.plan is None or not change.boundary_s:
            return 0.0
        progress = 1 - change.boundary_s / before.estimated_iteration_s
        # The first microbatch's way through the stages is not saved, however many are completed.
        part = min(each.microbatches / _slots(each) for each in self._cluster.plan.pipelines)
        return part * completed_share(before, change.removed, progress)

    def _follow(self, change: Change) -> list[Segment]:
        """Advance the cluster until it trains or waits, or until the next change, and return what it did."""
        cluster, segments = self._cluster, list[Segment]()
        while (next_s := cluster.next_s) is not None and next_s <= change.at_s < change.until_s:
            cluster.advance(change.until_s)
        while cluster.now < change.until_s and not cluster.failed:
            use = cluster.use
            if (use == "running" and not cluster.is_stopping) or (
                use == "waiting" and cluster.next_s is None
            ):
                break
            begin_s = cluster.now
            cluster.advance(change.until_s)
            if cluster.now == begin_s:
                continue
            seconds = cluster.now - begin_s
            if segments and segments[-1].use == use:
                seconds += segments.pop().seconds
            segments.append(Segment(use=use, seconds=seconds))
        return segments

    def _submit_again(self, change: Change, segments: Sequence[Segment]) -> Reaction:
        """Start the job from its beginning, since it has lost its state and has no checkpoint yet."""
        restart = Pause(category="restarting", seconds=self._parameters.prepare_s)
        pauses = (*_pauses(segments), restart)
        begin_s = change.at_s + total_s(pauses)
        self._cluster = VirtualCluster(self._job, self._parameters)
        self._cluster.start(change.nodes, begin_s)
        self._wake(running_since_s=begin_s)
        return Reaction(pauses=pauses, running=self._running(), undo="iteration", keep_iterations=0)

    def _running(self) -> Running | None:
        plan = self._cluster.plan
        if plan is None:
            return None
        best_s = self._job.iteration_s(self._present) or plan.estimated_iteration_s
        return Running(
            iteration_s=plan.estimated_iteration_s,
            samples=self._job.policy.global_batch,
            efficiency=min(1.0, best_s / plan.estimated_iteration_s),
            checkpoints=self._stalls(plan.estimated_iteration_s),
        )

    def _stalls(self, step_s: float) -> Checkpoints | None:
        """Return how often training is delayed by snapshots and persistent checkpoints; ``None``: never.

        What a persistent checkpoint costs is spread evenly over the snapshots in between, if those cost time, too.
        """
        parameters = self._parameters
        every = parameters.checkpoint_steps(self._job.state_bytes, step_s)
        stall_s = parameters.checkpoint_cost_s(self._job.state_bytes)
        if parameters.snapshot_every and parameters.snapshot_stall_s:
            stall_s = parameters.snapshot_stall_s + stall_s * parameters.snapshot_every / every
            every = parameters.snapshot_every
        return Checkpoints(every_iterations=every, stall_s=stall_s) if stall_s else None

    def _wake(self, running_since_s: float) -> None:
        """Note when to react next: at the cluster's next event, or after the first commit of a group.

        :param running_since_s: time of the beginning of the iteration in flight.
        """
        cluster = self._cluster
        times = [] if cluster.next_s is None else [cluster.next_s]
        if cluster.plan is not None and cluster.awaits_commit:
            times.append(running_since_s + cluster.plan.estimated_iteration_s + COMMIT_DELAY_S)
        self.wake_at_s = min(times, default=None)


def _pauses(segments: Sequence[Segment]) -> tuple[Pause, ...]:
    """Return the segments in which no steps commit."""
    return tuple(Pause(category=one.use, seconds=one.seconds) for one in segments if one.use != "running")


def _slots(pipeline: PipelinePlacement) -> int:
    """Return the length of an iteration of a pipeline, in times of one microbatch on one stage."""
    return pipeline.microbatches + len(pipeline.stages) - 1


def completed_share(plan: Plan, lost: Collection[str], progress: float) -> float:
    """Return the share of all microbatches that pipelines without ``lost`` nodes have completed.

    :param progress: share of the iteration's time that has passed.
    """
    completed = 0
    for pipeline in plan.pipelines:
        if not set(lost).intersection(pipeline.nodes):
            passed = math.floor(progress * _slots(pipeline)) - (len(pipeline.stages) - 1)
            completed += max(0, passed)
    return completed / sum(pipeline.microbatches for pipeline in plan.pipelines)
