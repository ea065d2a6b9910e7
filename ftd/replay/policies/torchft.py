"""``torchft``: replica groups that leave and return one by one (pytorch/torchft).

Assumptions:

* A replica group trains a whole replica of the model. It is one node, or with ``several_nodes`` the fewest nodes that
  hold a replica; without, a model that is larger than a node is excluded. Nodes beyond a multiple are idle.
* Each group computes a fixed number of samples: the job's batch divided by the groups at the start. So the batch
  shrinks with the groups that take part, and the time of an iteration stays. It never exceeds the job's batch: more
  groups than at the start divide that. The throughput is never above that of the job's best plan for the groups' nodes,
  which all policies have in common.
* When a node fails its group leaves: the attempt in flight is lost, the others notice it by a missed heartbeat and go
  on (measured here). The group's other nodes become idle.
* Idle nodes that suffice for a group start its processes and copy the state from another group while training goes on;
  the group joins at the next end of an iteration. Failures of a group that starts interrupt nothing.
* With fewer groups than the job's minimum (torchft's ``min_replica_size``) those that are left wait.
* When no group is left, the state is lost; the job starts again from the newest checkpoint as soon as a group is
  present. Checkpoints are asynchronous and taken at a fixed interval.
* Notices of preemption are not used.
"""

from collections.abc import Sequence
from typing import ClassVar

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import BytesPerS, Interval, Parameters, Seconds, TimedCheckpoints
from ftd.replay.policies.pace import Pace
from ftd.replay.policies.pauses import pauses, total_s
from ftd.replay.policy import Change, PolicyExcluded, Reaction, RecoveryPolicy, Running

Group = tuple[str, ...]


class TorchftParameters(TimedCheckpoints, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of torchft, as tuned here."""

    leave_s: Seconds
    """Time from a failure until the other groups train again."""
    start_s: Seconds
    """Time from the presence of a group's nodes to its first common iteration, without the copy of state."""
    join_s: Seconds
    """Time for which training stops when a group joins."""
    heal_bytes_per_s: BytesPerS
    """Highest rate at which a node receives state from another group; the job's link may be slower."""
    several_nodes: bool
    """Whether a replica group may have several nodes."""
    checkpoint_every_s: Interval
    """Time between two checkpoints, above 0."""


class TorchftPolicy(RecoveryPolicy):
    """Replica groups that leave and return."""

    name: ClassVar[str] = "torchft"

    def __init__(self, job: ReplayJob, parameters: Parameters) -> None:
        """:raises PolicyExcluded: a replica of the model needs several nodes, and they are not allowed."""
        self._times = times = parameters.section(self.name, TorchftParameters)
        self._pace, self._size = Pace(job=job), job.planner.n0
        if self._size > 1 and not times.several_nodes:
            raise PolicyExcluded(
                f"a replica of the model needs {self._size} nodes, and a replica group is one node"
            )
        rate = min(times.heal_bytes_per_s, job.profile.link.bytes_per_s)
        self._start_s = times.start_s + job.state_bytes / self._size / rate
        self._store_s = job.state_bytes / times.store_bytes_per_s
        self._groups: list[Group] = []
        """Groups that take part."""
        self._starting: list[tuple[float, Group]] = []
        """Groups that start, each with the time at which it can join."""
        self._idle: list[str] = []
        self._iteration_s = 0.0
        """Time of an iteration, which the first groups determine."""
        self._group_samples = 0.0
        """Samples of a group in an iteration."""
        self._resumes_s = 0.0
        """Time at which the last pauses end."""

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on ``nodes``, which determine the samples of a group."""
        self._idle = list(nodes)
        self._begin(0.0)
        return Reaction(running=self._run(len(nodes)))

    def change(self, change: Change) -> Reaction | None:
        """Return the reaction to groups that lose a node, that can join, or that can start."""
        lost = self._remove(change.removed)
        self._idle.extend(change.added)
        if not self._groups:
            return self._restart(change, lost=lost)
        self._starting += [(change.at_s + self._start_s, group) for group in self._take_groups()]
        present = len(change.nodes)
        if lost:
            self._resumes_s = change.at_s + self._times.leave_s
            self._wake()
            steps = pauses(("detecting", self._times.leave_s))
            return Reaction(pauses=steps, running=self._run(present), undo="iteration")
        ready = [group for at_s, group in self._starting if at_s <= change.at_s >= self._resumes_s]
        if ready:
            self._starting = [each for each in self._starting if each[1] not in ready]
            self._groups += ready
            self._resumes_s = change.at_s + change.boundary_s + self._times.join_s
            self._wake()
            steps = pauses(("restarting", self._times.join_s))
            return Reaction(pauses=steps, running=self._run(present), after_s=change.boundary_s)
        self._wake()
        if change.at_s < self._resumes_s or not (change.added or change.removed):
            return None
        return Reaction(running=self._run(present))

    def _wake(self) -> None:
        """Ask to be called when the next group can join, but not in a pause."""
        ready_s = min((at_s for at_s, _ in self._starting), default=None)
        self.wake_at_s = None if ready_s is None else max(ready_s, self._resumes_s)

    def _restart(self, change: Change, *, lost: bool) -> Reaction | None:
        """Load the newest checkpoint in all groups that the present nodes form."""
        self._idle, self._starting, self.wake_at_s = list(change.nodes), [], None
        self._begin(change.at_s)
        detect = pauses(("detecting", self._times.leave_s if lost else 0.0))
        if not self._groups:
            return Reaction(pauses=detect, running=None, undo="checkpoint") if lost else None
        steps = (*detect, *pauses(("restarting", self._times.start_s), ("moving", self._store_s)))
        self._resumes_s = change.at_s + total_s(steps)
        return Reaction(pauses=steps, running=self._run(len(change.nodes)), undo="checkpoint")

    def _begin(self, at_s: float) -> None:
        """Form groups of all nodes; those of the first time divide the job's batch."""
        count = len(self._idle) // self._size
        if self._iteration_s == 0:
            iteration_s = self._pace.iteration_s(count * self._size)
            if iteration_s is None:
                return
            self._iteration_s, self._group_samples = iteration_s, self._pace.samples / count
        self._groups, self._resumes_s = self._take_groups(), at_s

    def _remove(self, nodes: Sequence[str]) -> bool:
        """Dissolve the groups of removed nodes, and return whether one of them took part."""
        gone = set(nodes)
        broken = [group for group in self._groups if not gone.isdisjoint(group)]
        self._groups = [group for group in self._groups if gone.isdisjoint(group)]
        unstarted = [group for _, group in self._starting if not gone.isdisjoint(group)]
        self._starting = [each for each in self._starting if gone.isdisjoint(each[1])]
        self._idle += [node for group in (*broken, *unstarted) for node in group]
        self._idle = [node for node in self._idle if node not in gone]
        return bool(broken)

    def _take_groups(self) -> list[Group]:
        """Form groups of idle nodes."""
        count = len(self._idle) // self._size
        groups = [tuple(self._idle[index * self._size :][: self._size]) for index in range(count)]
        del self._idle[: count * self._size]
        return groups

    def _run(self, present: int) -> Running | None:
        nodes = len(self._groups) * self._size
        if nodes < self._pace.job.planner.fewest_nodes:
            return None
        samples = min(self._pace.samples, self._group_samples * len(self._groups))
        least_s = samples / self._pace.most_samples_per_s(nodes)
        iteration_s = least_s if samples == self._pace.samples else max(self._iteration_s, least_s)
        checkpoints = self._times.checkpoints(iteration_s, self._store_s)
        return self._pace.running_at(present, iteration_s, samples, checkpoints)
