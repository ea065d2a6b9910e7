"""Throughput without failures, on which a system's cost model stands.

``common``: every system runs at the throughput of the job's best plan for the nodes that it uses, so a comparison
shows what recovery costs. ``published``: a system runs at the throughput T(n) of the constants with which its
published tables are reproduced (``PublishedThroughput``, fitted).
"""

from dataclasses import dataclass

from ftd.replay.job import PublishedThroughput, ReplayJob
from ftd.replay.policy import Checkpoints, PolicyExcluded, Running


def published_constants(system: str, job: ReplayJob) -> PublishedThroughput:
    """Return the published constants of a system for the job.

    :raises PolicyExcluded: the job has none.
    """
    found = job.published.get(system)
    if found is None:
        raise PolicyExcluded(f"{job.name} has no published throughput under {system}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Iterations of one system on given numbers of nodes without failures."""

    job: ReplayJob
    published: PublishedThroughput | None = None
    """``None``: the throughput of the job's best plan."""

    def iteration_s(self, used: int) -> float | None:
        """Return the time of an iteration on ``used`` nodes; ``None``: they are too few."""
        if self.published is None:
            return self.job.iteration_s(used)
        samples_per_s = self.published.throughput(used)
        return self.published.global_batch / samples_per_s if samples_per_s else None

    @property
    def samples(self) -> float:
        """Return the samples of an iteration."""
        return self.job.policy.global_batch if self.published is None else self.published.global_batch

    def most_samples_per_s(self, nodes: int) -> float:
        """Return the throughput that ``nodes`` nodes allow if none is idle; 0: they are too few."""
        if self.published is None:
            return self.job.samples_per_s(nodes)
        published = self.published
        return float(published.samples_per_s * (nodes / published.nodes) ** published.exponent)

    def running(
        self, present: int, used: int, *, slowdown: float = 1.0, checkpoints: Checkpoints | None = None
    ) -> Running | None:
        """Return how the job runs on ``used`` of ``present`` nodes; ``None``: they are too few.

        :param slowdown: factor of the time of an iteration.
        """
        iteration_s = self.iteration_s(used)
        if iteration_s is None:
            return None
        return self.running_at(present, iteration_s * slowdown, self.samples, checkpoints)

    def running_at(
        self, present: int, iteration_s: float, samples: float, checkpoints: Checkpoints | None = None
    ) -> Running:
        """Return iterations of ``iteration_s`` as a share of what ``present`` nodes allow."""
        most = self.most_samples_per_s(present)
        return Running(
            iteration_s=iteration_s,
            samples=samples,
            efficiency=min(1.0, samples / iteration_s / most) if most else 1.0,
            checkpoints=checkpoints,
        )
