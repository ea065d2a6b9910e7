"""The place of persistent checkpoints: what is there stays, whoever dies; and what must hold of it."""

from dataclasses import dataclass, field

from ftd.faults.sim.oracle import Oracle
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, EmitEvent, FindCheckpoint
from statemachine.events import CheckpointFound
from statemachine.messages.cluster import Persist
from statemachine.messages.values import Checkpoint, LayerFile, Restore, SkippedCheckpoint, Vote

CALM_S = 46.0
"""A job that ends from here on had ``finish_s`` for its last checkpoint behind the healing."""


@dataclass(slots=True, kw_only=True)
class StoredCheckpoint:
    """A committed checkpoint."""

    attempt: str
    vote: Vote
    layers: dict[int, int]
    """Version of each layer."""
    damaged: bool = False
    """Seen by who reads it."""

    def as_value(self, step: int) -> Checkpoint:
        return Checkpoint(step=step, vote=self.vote, layers=len(self.layers))


@dataclass(slots=True, kw_only=True)
class SimCheckpointStore:
    """One directory, which every host reaches; all jobs of the simulation have one name."""

    truth: Oracle
    full: float = 0.0
    """Probability that a layer cannot be written."""
    kept: dict[int, StoredCheckpoint] = field(default_factory=dict)
    """By step."""
    drafts: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    closed_until: float = 0.0
    """Whoever reads or writes before this gets an error."""
    hung_until: float = 0.0
    """Whoever reads or writes before this waits."""
    settled: set[tuple[str, int]] = field(default_factory=set)
    """Job and step of what was committed and not undone since: never a second time."""

    @property
    def closed(self) -> bool:
        return self.truth.world.now < self.closed_until

    @property
    def hangs_s(self) -> float:
        """How long yet."""
        return max(0.0, self.hung_until - self.truth.world.now)

    def opens(self) -> None:
        self.closed_until = self.hung_until = 0.0

    # --- nodes -----------------------------------------------------------------------------------

    def write(self, order: Persist, layer: int, version: int) -> LayerFile:
        """One layer, of this version."""
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
        """Version of each of these layers; none where the checkpoint is gone or damaged, or out of reach."""
        kept = self.kept.get(restore.step)
        if kept is None or kept.damaged or self.closed:
            return {}
        wanted = self.truth.told.get(restore.step)
        for layer in layers:
            version = kept.layers[layer]
            if wanted not in (None, version) or self.truth.versions.step[version] != restore.step:
                self.truth.broken(f"version {version} is read as step {restore.step}, which is {wanted}")
        return {layer: kept.layers[layer] for layer in layers}

    # --- the coordinator -------------------------------------------------------------------------

    def commit(self, effect: CommitCheckpoint) -> tuple[int, ...]:
        """It is there from now on; the steps of older ones that were removed."""
        step, broken = effect.step, self.truth.broken
        draft = self.drafts.pop((step, effect.attempt), {})
        if effect.attempt != self.truth.writing:
            # It hung, and was given up; what comes of it may be of a past that was undone since.
            if len(draft) == self.truth.layers:
                self.kept.setdefault(
                    step, StoredCheckpoint(attempt=effect.attempt, vote=effect.vote, layers=draft)
                )
            return ()
        if sorted(draft) != list(range(self.truth.layers)):
            broken(f"a checkpoint of step {step} is committed with layers {sorted(draft)}")
        if {file.layer: file.digest for file in effect.layers} != {n: str(v) for n, v in draft.items()}:
            broken(f"the manifest of step {step} is not what was written")
        version = int(effect.vote.loss)
        if set(draft.values()) != {version} or self.truth.versions.step[version] != step:
            broken(f"the checkpoint of step {step} is of versions {draft}, not of {version}")
        if effect.job.job_id == self.truth.job_id and self.truth.told.get(step, version) != version:
            broken(f"the checkpoint of step {step} is of another step than was told")
        if (effect.job.job_id, step) in self.settled:
            broken(f"two checkpoints of step {step} were committed")
        self.settled.add((effect.job.job_id, step))
        self.kept[step] = StoredCheckpoint(attempt=effect.attempt, vote=effect.vote, layers=draft)
        old = sorted((s for s in self.kept if s <= step), reverse=True)[effect.job.checkpoint.keep :]
        pruned = tuple(sorted([*old, *(s for s in self.kept if s > step)]))
        for doomed in pruned:
            del self.kept[doomed]
        return pruned

    def abandon(self, effect: AbandonCheckpoint) -> None:
        self.drafts.pop((effect.step, effect.attempt), None)

    def newest(self, spoiled: tuple[int, ...] = ()) -> Checkpoint | None:
        steps = [step for step in self.kept if step not in spoiled]
        return self.kept[max(steps)].as_value(max(steps)) if steps else None

    def find(self, effect: FindCheckpoint, at: float) -> CheckpointFound:
        return CheckpointFound(
            at=at,
            cause=effect.cause,
            generation=effect.generation,
            checkpoint=self.newest(effect.corrupt_steps),
            skipped=tuple(SkippedCheckpoint(step=step, reason="damaged") for step in effect.corrupt_steps),
            reason="there is none",
        )

    def refuses(self, effect: FindCheckpoint, at: float) -> CheckpointFound:
        return CheckpointFound(
            at=at,
            cause=effect.cause,
            generation=effect.generation,
            checkpoint=None,
            skipped=(),
            reason="input/output error",
            unreadable=True,
        )

    # --- a user ----------------------------------------------------------------------------------

    def remove_damaged(self) -> None:
        """Whose job failed for them."""
        self.kept = {step: kept for step, kept in self.kept.items() if not kept.damaged}

    # --- what must hold --------------------------------------------------------------------------

    def goes_back(self, checkpoint: Checkpoint) -> None:
        """It was committed, and is the state of the step that was told; its damages nobody has seen yet."""
        step, version = checkpoint.step, int(checkpoint.vote.loss)
        kept = self.kept.get(step)
        if kept is None or set(kept.layers.values()) != {version}:
            self.truth.broken(f"rolled back to a checkpoint of step {step}, which is not there")
        if self.truth.told.get(step, version) != version:
            self.truth.broken(f"the checkpoint of step {step} is of another step than was told")

    def given_up(self, event: EmitEvent) -> None:
        """Once everything is well again, the last step's is written in time."""
        if self.truth.world.now > CALM_S and "after the last step" in event.reason:
            self.truth.broken("nothing is wrong, and the checkpoint of the last step does not come")

    def rolled_back(self, job: str, step: int) -> None:
        """What was committed behind it never was, and may be committed again."""
        self.settled = {(name, number) for name, number in self.settled if name != job or number <= step}
