"""What must hold of snapshots in memory: the newest complete one is there until the next one is complete."""

from ftd.faults.sim.losses import Written
from ftd.faults.sim.place import SimPlace
from ftd.faults.sim.versions import Versions
from ftd.faults.sim.world import Violation, World
from statemachine.cluster.snapshots.buddies import copy_of
from statemachine.messages.values import HeldSnapshot, Restore, Snapshot, SnapshotGroup


class SnapshotTruth:
    """A part of ``Invariants``."""

    place: SimPlace

    def __init__(self, world: World, versions: Versions) -> None:
        self.world, self.versions = world, versions
        self.job_id: str | None = None
        self.finished_job = False
        self.failed_job: str | None = None
        self.lineage = 0
        self.newest: Snapshot | None = None
        """Of the present job, as the coordinator's journal names it."""
        self.told: dict[int, int] = {}
        """Version of each step that the world was told is committed."""
        self.protected: dict[int, str] = {}
        """What each generation was told to protect its snapshots with."""
        self.writers: dict[HeldSnapshot, set[str]] = {}
        """Nodes that completed their part of a snapshot, ever; of a copy, those that received it."""

    def broken(self, what: str) -> None:
        raise Violation(f"at {self.world.now:.4f} s: {what}")

    def _keeps(self, machine: Written) -> None:
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
        for owner, buddy in record.buddies.items():
            if buddy not in self.writers.get(copy_of(self.key_of(record), owner), set()):
                self.broken(
                    f"the snapshot of step {record.step} counts, and {buddy} has no copy of {owner}'s"
                )
        if self.told.get(record.step, int(record.vote.loss)) != int(record.vote.loss):
            self.broken(f"the snapshot of step {record.step} is of another step than was told")

    def written(self, node: str, key: HeldSnapshot) -> None:
        self.writers.setdefault(key, set()).add(node)

    def drops(self, node: str, key: HeldSnapshot) -> None:
        """Only what is not the newest complete snapshot of the job under way may be written over."""
        over = self.finished_job or self.failed_job is not None
        if not over and self.newest is not None and key == self.key_of(self.newest):
            self.broken(f"{node} writes over its part of the newest snapshot, of step {key.step}")
        if not over:
            self.place.drops(node, key)

    def received(self, node: str, key: HeldSnapshot) -> None:
        self.writers.setdefault(key, set()).add(node)

    def drops_copy(self, node: str, key: HeldSnapshot) -> None:
        """As ``drops``, of what it keeps for another."""
        over = self.finished_job or self.failed_job is not None
        if over or self.newest is None or key != copy_of(self.key_of(self.newest), key.owner):
            return
        if self.newest.buddies.get(key.owner) == node:
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
