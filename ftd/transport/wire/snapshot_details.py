"""What ``details`` holds of the events about snapshots, persistent checkpoints and going back to them."""

from typing import Literal

from ftd.transport.wire.event_details import Details

Tier = Literal["memory", "decoded", "buddy", "persistent"]
"""Where state comes from: every shard is in its owner's memory; some are made from parity; some come from a
buddy's copy; from a persistent checkpoint."""


class SnapshotCompleted(Details, frozen=True, kw_only=True):
    """The state behind the step is complete in the memory of every owner; rollbacks go there from now on."""

    protection: str
    replica_peers: dict[str, str]
    """Owner → who keeps a copy of its part."""
    unprotected: list[list[int]]
    """``[first, last]`` layers that one node alone has."""
    size_bytes: int
    """All nodes, protection included."""
    copy_s: float
    stall_s: float
    """How long training waited, at most."""
    took_s: float
    """Since the order."""


class SnapshotAbandoned(Details, frozen=True, kw_only=True):
    """A snapshot will not be complete; the one before stays."""

    last_complete_step: int | None
    """Of the one before; null where there is none."""


class SnapshotIntervalChosen(Details, frozen=True, kw_only=True):
    """From now on snapshots are so many steps apart."""

    every_steps: int
    """0: none."""
    before: int
    by: Literal["user", "measurement"]
    step_s: float | None = None
    """Of a measurement."""
    cost_s: float | None = None
    """Training time that a snapshot takes; of a measurement."""
    horizon_s: float | None = None
    """Expected time to the next failure; of a measurement."""
    lost_share: float | None = None
    """Of all time, expected; of a measurement."""


class ProtectionChanged(Details, frozen=True, kw_only=True):
    """From this generation on snapshots are protected by another scheme."""

    protection: str
    before: str | None
    """Null at a job's start."""
    by: Literal["user", "auto", "fallback"]


class SnapshotsUnavailable(Details, frozen=True, kw_only=True):
    """A node prepares a job without snapshots: another daemon of its name uses their memory."""

    device: int


class ShardCorrupted(Details, frozen=True, kw_only=True):
    """What a node keeps of a snapshot cannot be used."""

    owner: str
    """The node whose part it is."""
    job: str
    step: int | None
    """Null: not of one snapshot alone."""
    part: str


class ShardRepaired(Details, frozen=True, kw_only=True):
    """What had changed in a node's memory is there again, to the byte."""

    owner: str
    """The node whose part it is."""
    job: str
    step: int
    part: str
    sources: tuple[str, ...]
    """Nodes that it was made from."""
    size_bytes: int


class OptimizerReplicaDiverged(Details, frozen=True, kw_only=True):
    """A node's replica of another's optimizer state was not what its owner has; it was made anew."""

    layer: int


class RolledBack(Details, frozen=True, kw_only=True):
    """Everybody goes back to a snapshot or a persistent checkpoint."""

    from_step: int
    to_step: int
    undone_steps: int
    tier: Tier
    sources: list[str]
    """Nodes whose memory it comes from."""


class JobResumed(RolledBack, frozen=True, kw_only=True):
    """The job begins with the state of a checkpoint that an earlier job of its name left."""


class RestoreFailed(Details, frozen=True, kw_only=True):
    """A node cannot put together what it needs; it is tried again without the bad ones."""

    bad: list[str]
    """Nodes whose shards cannot be had or are damaged."""


class CheckpointStarted(Details, frozen=True, kw_only=True):
    """Nodes were told to write a snapshot to the disk."""

    url: str
    layers: dict[str, int]
    """How many each node writes."""


class CheckpointCompleted(Details, frozen=True, kw_only=True):
    """A persistent checkpoint is complete: whoever looks finds it."""

    size_bytes: int
    took_s: float
    """Since CheckpointStarted."""
    pruned: list[int]
    """Steps of older ones that were removed."""


class CheckpointAbandoned(Details, frozen=True, kw_only=True):
    """A persistent checkpoint will not be; those before stay."""

    last_complete_step: int | None
    """Of the newest that this job knows of."""


class CheckpointExported(Details, frozen=True, kw_only=True):
    """A checkpoint was exported: ``from_pretrained`` reads the directory."""

    directory: str
    size_bytes: int
    """All weights."""
    took_s: float


class CheckpointExportFailed(Details, frozen=True, kw_only=True):
    """A checkpoint could not be exported; the checkpoint itself is there, and the next one is tried."""

    directory: str


class CheckpointSkipped(Details, frozen=True, kw_only=True):
    """Something at the checkpoints' place is no complete checkpoint, or damaged, and was passed over."""

    url: str
