"""The store of persistent checkpoints, which survives every process, and its invariants."""

from dataclasses import dataclass, field

from ftd.faults.sim.oracle import Oracle
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, EmitEvent, FindCheckpoint
from statemachine.events import CheckpointFound
from statemachine.messages.cluster import Persist
from statemachine.messages.values import CheckpointRecord, LayerFile, Restore, SkippedCheckpoint, Vote

CALM_S = 46.0
"""A job that ends after this time has had ``finish_s`` since the healing to write its last checkpoint."""


@dataclass(slots=True, kw_only=True)
class StoredCheckpoint:
    """A committed checkpoint."""

    vote: Vote
    layers: dict[int, int]
    """The state version of each layer."""
    corrupt: bool = False
    """Whether the checkpoint is corrupt, which every reader notices."""

    def as_value(self, step: int) -> CheckpointRecord:
        return CheckpointRecord(step=step, vote=self.vote, layers=len(self.layers))


@dataclass(slots=True, kw_only=True)
class SimCheckpointStore:
    """One directory that every host reaches. All jobs of a simulation run have the same name."""

    oracle: Oracle
    write_failure_probability: float = 0.0
    """The probability that a layer cannot be written."""
    checkpoints: dict[int, StoredCheckpoint] = field(default_factory=dict)
    """Complete checkpoints by step."""
    drafts: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    unavailable_until: float = 0.0
    """Time before which reads and writes fail."""
    hung_until: float = 0.0
    """Time until which reads and writes wait."""
    committed_steps: set[tuple[str, int]] = field(default_factory=set)
    """Job and step of what was committed and not undone since, which must not be committed again."""

    @property
    def unavailable(self) -> bool:
        return self.oracle.world.now < self.unavailable_until

    @property
    def hangs_for_s(self) -> float:
        """Time for which the store still hangs, in seconds."""
        return max(0.0, self.hung_until - self.oracle.world.now)

    def reopen(self) -> None:
        self.unavailable_until = self.hung_until = 0.0

    # --- nodes -----------------------------------------------------------------------------------

    def write(self, order: Persist, layer: int, version: int) -> LayerFile:
        """Write one layer of this version."""
        self.drafts.setdefault((order.record.step, order.attempt), {})[layer] = version
        return LayerFile(
            layer=layer,
            name=f"layer-{layer}",
            size_bytes=1,
            digest=str(version),
            header_bytes=0,
            header_digest="",
            payload_bytes=1,
        )

    def read(self, restore: Restore, layers: set[int]) -> dict[int, int]:
        """Return the version of each of these layers; empty if the checkpoint is gone, corrupt or out of
        reach.
        """
        stored = self.checkpoints.get(restore.step)
        if stored is None or stored.corrupt or self.unavailable:
            return {}
        found = {layer: stored.layers[layer] for layer in layers}
        self.oracle.check_versions(restore.step, found.values(), "read")
        return found

    # --- the coordinator -------------------------------------------------------------------------

    def commit(self, effect: CommitCheckpoint) -> tuple[int, ...]:
        """Commit a checkpoint, and return the steps of older ones that were removed."""
        step, broken = effect.step, self.oracle.violated
        draft = self.drafts.pop((step, effect.attempt), {})
        if effect.attempt != self.oracle.writing:
            # The commit hung and was abandoned; its state may have been undone since.
            if len(draft) == self.oracle.layers:
                self.checkpoints.setdefault(step, StoredCheckpoint(vote=effect.vote, layers=draft))
            return ()
        if sorted(draft) != list(range(self.oracle.layers)):
            broken(f"a checkpoint of step {step} is committed with layers {sorted(draft)}")
        if {file.layer: file.digest for file in effect.layers} != {n: str(v) for n, v in draft.items()}:
            broken(f"the manifest of step {step} is not what was written")
        version = int(effect.vote.loss)
        if set(draft.values()) != {version} or self.oracle.versions.step[version] != step:
            broken(f"the checkpoint of step {step} is of versions {draft}, not of {version}")
        if effect.job.job_id == self.oracle.job_id and self.oracle.published.get(step, version) != version:
            broken(f"the checkpoint of step {step} is not the published state of that step")
        if (effect.job.job_id, step) in self.committed_steps:
            broken(f"two checkpoints of step {step} were committed")
        self.committed_steps.add((effect.job.job_id, step))
        self.checkpoints[step] = StoredCheckpoint(vote=effect.vote, layers=draft)
        old = sorted((s for s in self.checkpoints if s <= step), reverse=True)[effect.job.checkpoint.keep :]
        pruned = tuple(sorted([*old, *(s for s in self.checkpoints if s > step)]))
        for removed in pruned:
            del self.checkpoints[removed]
        return pruned

    def abandon(self, effect: AbandonCheckpoint) -> None:
        self.drafts.pop((effect.step, effect.attempt), None)

    def newest(self, corrupt_steps: tuple[int, ...] = ()) -> CheckpointRecord | None:
        steps = [step for step in self.checkpoints if step not in corrupt_steps]
        return self.checkpoints[max(steps)].as_value(max(steps)) if steps else None

    def find(self, effect: FindCheckpoint, at: float) -> CheckpointFound:
        corrupt_steps = () if self.unavailable else effect.corrupt_steps
        return CheckpointFound(
            at=at,
            cause=effect.cause,
            generation=effect.generation,
            checkpoint=None if self.unavailable else self.newest(corrupt_steps),
            skipped=tuple(SkippedCheckpoint(step=step, reason="damaged") for step in corrupt_steps),
            reason="input/output error" if self.unavailable else "there is none",
            unreadable=self.unavailable,
        )

    # --- a user ----------------------------------------------------------------------------------

    def remove_corrupt(self) -> None:
        """Remove the corrupt checkpoints, as a user does whose job failed because of them."""
        self.checkpoints = {step: stored for step, stored in self.checkpoints.items() if not stored.corrupt}

    # --- what must hold --------------------------------------------------------------------------

    def check_rollback(self, checkpoint: CheckpointRecord) -> None:
        """Check the checkpoint of a rollback: it was committed, and it is the state of the published step. Its
        corruption may not have been noticed yet.
        """
        step, version = checkpoint.step, int(checkpoint.vote.loss)
        stored = self.checkpoints.get(step)
        if stored is None or set(stored.layers.values()) != {version}:
            self.oracle.violated(f"rolled back to a checkpoint of step {step}, which does not exist")
        if self.oracle.published.get(step, version) != version:
            self.oracle.violated(f"the checkpoint of step {step} is not the published state of that step")

    def on_abandoned(self, event: EmitEvent) -> None:
        """Check that the checkpoint of the last step is written in time once all faults are healed."""
        if self.oracle.world.now > CALM_S and "after the last step" in event.reason:
            self.oracle.violated("all faults are healed, but the checkpoint of the last step is abandoned")

    def rolled_back(self, job: str, step: int) -> None:
        """Forget the commits after ``step``: they were undone, and these steps may be committed again."""
        self.committed_steps = {
            (name, number) for name, number in self.committed_steps if name != job or number <= step
        }
