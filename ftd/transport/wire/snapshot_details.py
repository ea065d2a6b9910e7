"""The ``details`` of events about snapshots, persistent checkpoints and rollbacks."""

from typing import Literal

from ftd.transport.wire.event_details import Details

Tier = Literal["memory", "decoded", "buddy", "persistent"]
"""Source of restored state: every shard is in its owner's memory; some are decoded from parity; some come from
the copy of a replica peer; all come from a persistent checkpoint.
"""


class SnapshotCompleted(Details, frozen=True, kw_only=True):
    """The state after the step is complete in the memory of every owner; rollbacks use it from now on."""

    protection: str
    replica_peers: dict[str, str]
    """The node that holds a copy of each owner's part, by owner."""
    unprotected: list[list[int]]
    """``[first, last]`` layers that only one node holds."""
    size_bytes: int
    """Bytes on all nodes, including protection."""
    copy_s: float
    stall_s: float
    """Longest time that training waited, in seconds."""
    took_s: float
    """Seconds since the order."""


class SnapshotAbandoned(Details, frozen=True, kw_only=True):
    """A snapshot will not be complete; the one before it remains."""

    last_complete_step: int | None
    """Step of the last complete snapshot; null: there is none."""


class SnapshotIntervalChosen(Details, frozen=True, kw_only=True):
    """The number of steps between snapshots changed."""

    every_steps: int
    """0: no snapshots."""
    before: int
    by: Literal["user", "measurement"]
    step_s: float | None = None
    """Duration of a step, if measured."""
    cost_s: float | None = None
    """Training time that a snapshot costs, if measured."""
    horizon_s: float | None = None
    """Expected time to the next failure, if measured."""
    lost_share: float | None = None
    """Expected share of all time that is lost, if measured."""


class ProtectionChanged(Details, frozen=True, kw_only=True):
    """Snapshots of this generation and later ones are protected by another scheme."""

    protection: str
    before: str | None
    """Previous scheme; null at the start of a job."""
    by: Literal["user", "auto", "fallback"]


class SnapshotsUnavailable(Details, frozen=True, kw_only=True):
    """A node prepares a job without snapshots: another daemon of its name uses their memory, or it cannot be used."""

    device: int


class ShardCorrupted(Details, frozen=True, kw_only=True):
    """Some data of a snapshot on a node cannot be used."""

    owner: str
    """The node that owns the part."""
    job: str
    step: int | None
    """Step of the snapshot; null if the damage is not limited to one."""
    part: str


class ShardRepaired(Details, frozen=True, kw_only=True):
    """Data of a snapshot that had changed in a node's memory were restored exactly."""

    owner: str
    """The node that owns the part."""
    job: str
    step: int
    part: str
    sources: tuple[str, ...]
    """Nodes from which it was made."""
    size_bytes: int


class OptimizerReplicaDiverged(Details, frozen=True, kw_only=True):
    """A node's replica of another node's optimizer state differed from the owner's; it was replaced."""

    layer: int


class RolledBack(Details, frozen=True, kw_only=True):
    """All nodes return to a snapshot or a persistent checkpoint."""

    from_step: int
    to_step: int
    undone_steps: int
    tier: Tier
    sources: list[str]
    """Nodes from whose memory the state comes."""


class JobResumed(RolledBack, frozen=True, kw_only=True):
    """The job begins with the state of a checkpoint that an earlier job of its name left."""


class RestoreFailed(Details, frozen=True, kw_only=True):
    """A node cannot restore the state that it needs; it tries again without the bad nodes."""

    bad: list[str]
    """Nodes whose shards are missing or corrupt."""


class CheckpointStarted(Details, frozen=True, kw_only=True):
    """Nodes were ordered to write a snapshot to the disk."""

    url: str
    layers: dict[str, int]
    """Number of layers that each node writes."""


class CheckpointCompleted(Details, frozen=True, kw_only=True):
    """A persistent checkpoint is complete and can be found."""

    size_bytes: int
    took_s: float
    """Seconds since CheckpointStarted."""
    pruned: list[int]
    """Steps of older checkpoints that were removed."""


class CheckpointIntervalChosen(Details, frozen=True, kw_only=True):
    """The number of steps between persistent checkpoints changed."""

    every_steps: int
    before: int
    step_s: float
    """Duration of a step while no checkpoint is written."""
    cost_s: float
    """Training time that a checkpoint costs."""
    write_s: float
    """Time from CheckpointStarted to CheckpointCompleted."""
    failure_horizon_s: float
    """Expected time to the next failure."""
    loss_horizon_s: float
    """Expected time until no memory holds the state."""
    lost_share: float
    """Expected share of all time that is lost."""


class CheckpointAbandoned(Details, frozen=True, kw_only=True):
    """A persistent checkpoint will not be complete; the earlier ones remain."""

    last_complete_step: int | None
    """Step of the newest checkpoint that this job knows of; null: there is none."""


class CheckpointExported(Details, frozen=True, kw_only=True):
    """A checkpoint was exported: ``from_pretrained`` reads the directory."""

    directory: str
    size_bytes: int
    """Bytes of all weights."""
    took_s: float


class CheckpointExportFailed(Details, frozen=True, kw_only=True):
    """A checkpoint could not be exported. The checkpoint itself exists, and the next one will be exported."""

    directory: str


class CheckpointSkipped(Details, frozen=True, kw_only=True):
    """Something at the checkpoint location is incomplete or corrupt, and was skipped."""

    url: str
