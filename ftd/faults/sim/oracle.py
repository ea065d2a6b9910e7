"""What is true in the simulated world, and what must hold of the snapshots that hosts keep in their memory.

``Oracle`` knows no process of the world: hosts and trainers report to it what they do. What is checked
against the nodes
and what coordinators publish is in ``Invariants``, which extends it.
"""

from collections.abc import Callable
from typing import Any

from ftd.faults.sim.versions import Versions, vote_of
from ftd.faults.sim.world import InvariantViolation, World
from planner.values import ModelProfile, Policy
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots.replica_peers import copy_of
from statemachine.messages.cluster import Persist, ToNodes
from statemachine.messages.values import HeldSnapshot, Restore, Snapshot, SnapshotGroup, Vote

OF_A_VOTE = ("gradient_norm", "skipped", "weight", "loss_scale", "learning_rate", "metrics")


class JournalView:
    """What a journal that is written says."""

    def __init__(self, machine: ClusterMachine) -> None:
        self.job_id, self.snapshot, self.checkpoint = machine.job_id, machine.snapshot, machine.checkpoint
        self.job = machine.job
        self.writing, self.lineage = machine.writing, machine.lineage
        self.committed_step, self.members = machine.committed_step, machine.members
        self.generation = machine.generation


class Oracle:
    """The state of the present job as the world knows it; each method checks what has just become true.

    The newest complete snapshot in memory stays until the next one is complete.
    """

    def __init__(self, world: World, policy: Policy, profile: ModelProfile) -> None:
        self.world, self.versions = world, Versions()
        self.policy, self.profile = policy, profile
        self.layers = len(profile.layers)
        self.job_id: str | None = None
        self.finished_job = False
        self.failed_job: str | None = None
        self.lineage = 0
        self.newest: Snapshot | None = None
        """Of the present job, as the coordinator's journal names it."""
        self.writing = ""
        """Attempt at a checkpoint that the coordinator's journal names; empty: none."""
        self.told: dict[int, int] = {}
        """Version of each step that the world was told is committed."""
        self.told_after: dict[int, int] = {}
        """So many losses of the newest journal each step was told."""
        self.newest_told = 0
        self.newest_resume = 0
        self.protected: dict[int, str] = {}
        """What each generation was told to protect its snapshots with."""
        self.writers: dict[HeldSnapshot, set[str]] = {}
        """Nodes that completed their part of a snapshot, ever; of a copy, those that received it."""
        self.out: dict[str, set[int]] = {}
        """Incarnations per node that obeyed a Fence."""
        self.on_commit: Callable[[], None] = lambda: None
        """Called when a rank commits: a moment at which faults like to come."""

    def broken(self, what: str) -> None:
        raise InvariantViolation(f"at {self.world.now:.4f} s: {what}")

    # --- what a journal says of snapshots -----------------------------------------------------------

    def keeps(self, machine: JournalView) -> None:
        """The journal names another one only once that is complete, and none only where all is undone."""
        record, before = machine.snapshot, self.newest
        if record == before:
            return
        older = before is not None and (record is None or record.step < before.step)
        if older and machine.lineage == self.lineage:
            self.broken(f"the snapshot of step {before.step if before else 0} is given up for {record}")
        self.newest = record
        self._newest_is_complete()

    def key_of(self, record: Snapshot) -> HeldSnapshot:
        return HeldSnapshot(job_id=self.job_id or "", step=record.step, generation=record.generation)

    def _newest_is_complete(self) -> None:
        """Every owner completed its part; and told the state of a step that was committed."""
        record = self.newest
        if record is None:
            return
        missing = set(record.owners) - self.writers.get(self.key_of(record), set())
        if missing:
            self.broken(
                f"the snapshot of step {record.step} counts, and {sorted(missing)} did not complete it"
            )
        written = self.protected.get(record.generation)
        counted = {group.protection for group in record.groups}
        if counted != {written}:
            self.broken(f"the snapshot of step {record.step} is {written}, and counts as {sorted(counted)}")
        for owner, buddy in record.replica_peers.items():
            if buddy not in self.writers.get(copy_of(self.key_of(record), owner), set()):
                self.broken(
                    f"the snapshot of step {record.step} counts, and {buddy} has no copy of {owner}'s"
                )
        if self.told.get(record.step, int(record.vote.loss)) != int(record.vote.loss):
            self.broken(f"the snapshot of step {record.step} is of another step than was told")

    # --- what a host's memory keeps -----------------------------------------------------------------

    def written(self, node: str, key: HeldSnapshot) -> None:
        self.writers.setdefault(key, set()).add(node)

    def drops(self, node: str, key: HeldSnapshot, persisting: Persist | None) -> None:
        """Only what is not the newest complete snapshot of the job under way may be written over; nor what the node
        is ``persisting`` while the coordinator waits for it."""
        if self.finished_job or self.failed_job is not None:
            return
        if self.newest is not None and key == self.key_of(self.newest):
            self.broken(f"{node} writes over its part of the newest snapshot, of step {key.step}")
        if persisting is None or persisting.attempt != self.writing:
            return
        if key == self.key_of(persisting.record):
            self.broken(f"{node} writes over the snapshot of step {key.step} while it is persisted")

    def received(self, node: str, key: HeldSnapshot) -> None:
        self.writers.setdefault(key, set()).add(node)

    def drops_copy(self, node: str, key: HeldSnapshot) -> None:
        """As ``drops``, of what it keeps for another."""
        over = self.finished_job or self.failed_job is not None
        if over or self.newest is None or key != copy_of(self.key_of(self.newest), key.owner):
            return
        if self.newest.replica_peers.get(key.owner) == node:
            self.broken(f"{node} writes over its copy of {key.owner}'s part of step {key.step}")

    def restores(self, restore: Restore, group: SnapshotGroup, shards: list[dict[int, int]]) -> None:
        """What is put together is the state of exactly that step, whoever's shards it is made from."""
        if any(shard != shards[0] for shard in shards):
            self.broken(f"the shards of layers {group.first_layer} … of step {restore.step} differ: {shards}")
        wanted = self.told.get(restore.step)
        for version in shards[0].values():
            if self.versions.step[version] != restore.step or wanted not in (None, version):
                self.broken(f"version {version} is restored as step {restore.step}, which is {wanted}")
        if len(shards[0]) != group.end_layer - group.first_layer:
            self.broken(f"layers of group {group.first_layer} are missing in {shards[0]}")

    # --- nodes --------------------------------------------------------------------------------------

    def fenced(self, name: str, incarnation: int) -> None:
        self.out.setdefault(name, set()).add(incarnation)

    def heard(self, name: str, incarnation: int, message: ToNodes, *, taken: bool) -> None:
        """What is for several nodes is taken by those that are meant, as they are now."""
        if taken != (message.receivers.get(name) == incarnation):
            self.broken(f"{name} {'takes' if taken else 'misses'} a command: {message}")

    def signals(self, name: str, incarnation: int) -> None:
        if incarnation in self.out.get(name, ()):
            self.broken(f"{name} speaks under incarnation {incarnation} after it was fenced")

    # --- votes --------------------------------------------------------------------------------------

    def resumes_from(self, vote: Vote | None) -> None:
        """A trainer takes the state of a step over from others: with it, all that the step's vote says."""
        if vote is not None:
            self.same_vote({name: getattr(vote, name) for name in OF_A_VOTE}, int(vote.loss))

    def same_vote(self, said: dict[str, Any], version: int) -> None:
        vote = vote_of(version)
        for name, value in said.items():
            if value != getattr(vote, name):
                self.broken(
                    f"{name} of version {version} is {value}, and the vote said {getattr(vote, name)}"
                )
