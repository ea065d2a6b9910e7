"""The simulator's oracle: what is true in the simulated world, and the invariants of the snapshots that hosts
hold in memory.

``Oracle`` knows no process of the world: hosts and trainers report to it what they do. ``Invariants``
extends it with the checks against nodes and against what coordinators publish.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ftd.faults.sim.versions import Versions, vote_of
from ftd.faults.sim.world import InvariantViolation, World
from planner.values import ModelProfile, Policy
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots.replica_peers import copy_of
from statemachine.messages.cluster import Persist, ToNodes
from statemachine.messages.values import Divergence, HeldSnapshot, Restore, Snapshot, SnapshotGroup, Vote

VOTE_FIELDS = ("gradient_norm", "skipped", "weight", "loss_scale", "learning_rate", "metrics")


class JournalView:
    """A view of the content of a journal that is written."""

    def __init__(self, machine: ClusterMachine) -> None:
        cluster = machine.cluster
        writing = cluster.checkpoints.writing
        self.job_id, self.job = machine.job_id, cluster.job
        self.snapshot, self.checkpoint = cluster.snapshots.newest, cluster.checkpoints.newest
        self.writing = writing.attempt if writing is not None else ""
        self.generation, self.lineage = cluster.generation, cluster.lineage
        self.committed_step, self.members = cluster.progress.known_step, tuple(sorted(cluster.members))
        self.diverged = cluster.replicas.diverged
        self.skipped_batches = cluster.spikes.skipped_batches
        self.skipped_updates = cluster.progress.skipped.total


class Oracle:
    """The state of the current job as far as it is published. Each method checks what has just become true.

    The newest complete snapshot in memory must stay until the next one is complete.
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
        """The newest snapshot of the current job that the coordinator's journal names."""
        self.skipped_batches: tuple[int, ...] = ()
        """Batches that the newest journal leaves out of the sample order."""
        self.skipped_updates = 0
        """Number of skipped updates in the newest journal."""
        self.writing = ""
        """The attempt at a checkpoint that the coordinator's journal names; empty if there is none."""
        self.published: dict[int, int] = {}
        """The version of each step that was published as committed."""
        self.published_after: dict[int, int] = {}
        """Number of losses of the newest journal at the time when a step was published, by step."""
        self.newest_published = 0
        self.newest_resume = 0
        self.protections: dict[int, str] = {}
        """The protection of snapshots that each generation was given."""
        self.writers: dict[HeldSnapshot, set[str]] = {}
        """Nodes that ever completed their part of a snapshot, or received a snapshot copy."""
        self.fenced_incarnations: dict[str, set[int]] = {}
        """Incarnations of each node that obeyed a Fence."""
        self.flips: dict[int, int] = {}
        """The oldest step whose state a flipped bit changed on a trainer, by the generation that trained."""
        self.wrong_devices: dict[str, int] = {}
        """Incarnation of each node whose device was wrong in the check before it may take part."""
        self.diverged: Divergence | None = None
        """Copies of layers that differ, as the coordinator's journal names them."""
        self.on_commit: Callable[[], None] = lambda: None
        """Callback for the moment when a rank commits, which is a good moment for faults."""

    def violated(self, what: str) -> None:
        """End the run, also where the code of a daemon handles exceptions.

        :raises InvariantViolation: always.
        """
        violation = InvariantViolation(f"at {self.world.now:.4f} s: {what}")
        self.world.fail(violation)
        raise violation

    # --- snapshots in journals -----------------------------------------------------------------------

    def check_retained(self, machine: JournalView) -> None:
        """Check that the journal replaces a snapshot only by a complete one, and drops it only if its step was
        undone.
        """
        record, before = machine.snapshot, self.newest
        if record == before:
            return
        older = before is not None and (record is None or record.step < before.step)
        if older and machine.lineage == self.lineage:
            self.violated(
                f"the snapshot of step {before.step if before else 0} is replaced by {record}, which is older"
            )
        self.newest = record
        self._newest_is_complete()

    def key_of(self, record: Snapshot) -> HeldSnapshot:
        return HeldSnapshot(job_id=self.job_id or "", step=record.step, generation=record.generation)

    def _newest_is_complete(self) -> None:
        """Check that every owner completed its part, and that the snapshot is the state of a committed step."""
        record = self.newest
        if record is None:
            return
        missing = set(record.owners) - self.writers.get(self.key_of(record), set())
        if missing:
            self.violated(
                f"the snapshot of step {record.step} counts, but {sorted(missing)} did not complete it"
            )
        written = self.protections.get(record.generation)
        counted = {group.protection for group in record.groups}
        if counted != {written}:
            self.violated(
                f"the snapshot of step {record.step} is protected by {written}, but counts as {sorted(counted)}"
            )
        for owner, peer in record.replica_peers.items():
            if peer not in self.writers.get(copy_of(self.key_of(record), owner), set()):
                self.violated(
                    f"the snapshot of step {record.step} counts, but {peer} has no copy of {owner}'s shard"
                )
        if self.published.get(record.step, int(record.vote.loss)) != int(record.vote.loss):
            self.violated(f"the snapshot of step {record.step} is not the published state of that step")

    def on_corrupted(self, generation: int, step: int) -> None:
        """Note that a bit of the state after ``step`` flipped on a trainer. Its gradients reach all others."""
        self.flips[generation] = min(step, self.flips.get(generation, step))

    def on_wrong_device(self, node: str, incarnation: int) -> None:
        """Note that a check that a node has to pass before it takes part found a wrong product."""
        self.wrong_devices[node] = incarnation

    # --- snapshots in a host's memory ----------------------------------------------------------------

    def on_written(self, node: str, key: HeldSnapshot) -> None:
        """Note that a node completed its part of a snapshot, or received a snapshot copy."""
        self.writers.setdefault(key, set()).add(node)

    def check_dropped(self, node: str, key: HeldSnapshot, persisting: Persist | None) -> None:
        """Check that the dropped snapshot is not the running job's newest complete one, nor the one that the
        node is ``persisting`` while the coordinator waits for it.
        """
        if self.finished_job or self.failed_job is not None:
            return
        if self.newest is not None and key == self.key_of(self.newest):
            self.violated(f"{node} overwrites its shard of the newest snapshot, of step {key.step}")
        if persisting is None or persisting.attempt != self.writing:
            return
        if key == self.key_of(persisting.record):
            self.violated(f"{node} overwrites the snapshot of step {key.step} while it is persisted")

    def check_dropped_copy(self, node: str, key: HeldSnapshot) -> None:
        """Check a dropped snapshot copy in the same way."""
        over = self.finished_job or self.failed_job is not None
        if over or self.newest is None or key != copy_of(self.key_of(self.newest), key.owner):
            return
        if self.newest.replica_peers.get(key.owner) == node:
            self.violated(f"{node} overwrites its copy of {key.owner}'s shard of step {key.step}")

    def check_restored(self, restore: Restore, group: SnapshotGroup, shards: list[dict[int, int]]) -> None:
        """Check that the restored layers are the state of exactly that step, whoever's shards they are made
        from.
        """
        if any(shard != shards[0] for shard in shards):
            self.violated(
                f"the shards of layers {group.first_layer} … of step {restore.step} differ: {shards}"
            )
        self.check_versions(restore.step, shards[0].values(), "restored")
        if len(shards[0]) != group.end_layer - group.first_layer:
            self.violated(f"layers of group {group.first_layer} are missing in {shards[0]}")

    def check_versions(self, step: int, versions: Iterable[int], how: str) -> None:
        """Check that these versions, which are ``how`` as the state of a step, are those of that very step."""
        published_version = self.published.get(step)
        for version in versions:
            if self.versions.step[version] != step or published_version not in (None, version):
                self.violated(
                    f"version {version} is {how} as step {step}, whose version is {published_version}"
                )

    # --- nodes --------------------------------------------------------------------------------------

    def on_fenced(self, name: str, incarnation: int) -> None:
        self.fenced_incarnations.setdefault(name, set()).add(incarnation)

    def check_addressed(self, name: str, incarnation: int, message: ToNodes, *, taken: bool) -> None:
        """Check that a message to several nodes is handled exactly by the current incarnations that it is
        meant for.
        """
        if taken != (message.receivers.get(name) == incarnation):
            self.violated(f"{name} {'handles' if taken else 'ignores'} a command: {message}")

    def check_signal(self, name: str, incarnation: int) -> None:
        if incarnation in self.fenced_incarnations.get(name, ()):
            self.violated(f"{name} publishes under incarnation {incarnation} after it was fenced")

    def check_batch(self, before: int, version: int) -> None:
        """Check that a step uses a batch that no earlier step of its past has used."""
        batch = self.versions.batch
        if batch[version] <= batch[before]:
            step = self.versions.step[version]
            self.violated(f"step {step} uses batch {batch[version]} after batch {batch[before]}")

    # --- votes --------------------------------------------------------------------------------------

    def check_resumed_vote(self, vote: Vote | None) -> None:
        """Check a vote that a trainer takes over together with the state of its step."""
        if vote is not None:
            self.check_vote(msgspec.structs.asdict(vote), int(vote.loss))

    def check_vote(self, values: Mapping[str, Any], version: int) -> None:
        vote = vote_of(version)
        for name in VOTE_FIELDS:
            if values[name] != getattr(vote, name):
                self.violated(
                    f"{name} of version {version} is {values[name]}, but its vote says {getattr(vote, name)}"
                )
