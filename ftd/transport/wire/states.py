"""The cluster's state as it is retained on ``cluster/state``."""

from typing import Literal

import msgspec

from ftd.transport.wire.event_details import PipelineData
from statemachine.messages.values import ClusterPhase, NodeState


class StateData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what the cluster's state is made of."""


class PlanningData(StateData, frozen=True, kw_only=True):
    """Plans for so many numbers of nodes are being precomputed; training may run meanwhile."""

    done: int
    total: int


class SnapshotState(StateData, frozen=True, kw_only=True):
    """The newest snapshot that is complete everywhere."""

    step: int
    generation: int
    at: str
    """ISO-8601, UTC."""
    size_bytes: int
    protection: str
    owners: int
    """Nodes that kept a part of it."""
    present: int
    """Nodes that still have theirs."""
    missing: list[str]
    """Those that have not."""


class SnapshotPolicyState(StateData, frozen=True, kw_only=True):
    """What is taken from now on."""

    every_steps: int
    """0: none for now."""
    auto_interval: bool
    protection: str
    auto_protection: bool


class CheckpointState(StateData, frozen=True, kw_only=True):
    """The newest persistent checkpoint that this job wrote or began from, and what is being written."""

    url: str
    step: int | None
    """Null: none yet."""
    size_bytes: int
    writing_step: int | None


class JobState(StateData, frozen=True, kw_only=True):
    """The job under way, or the last one."""

    id: str
    name: str
    steps: int
    global_batch: int


class NodeSummary(StateData, frozen=True, kw_only=True):
    """A node as the coordinator knows it."""

    state: NodeState
    incarnation: int
    devices: int
    host: str
    in_plan: bool
    draining: bool
    step: int
    speed: float
    """Below 1 while it is a straggler."""


class ClusterState(StateData, frozen=True, kw_only=True):
    """Retained on ``cluster/state``."""

    schema: int
    version: str
    """Of the coordinator."""
    coordinator: int
    """Its incarnation."""
    leader: str = ""
    """Its name."""
    term: int = 0
    """Under which it leads; one more with each taking over."""
    standbys: list[str] = []
    """Names of the coordinators that would take over, in this order."""
    ineligible: dict[str, str] = {}
    """Those that are there and would not, each with the reason in words: another version of ftd."""
    at: str
    """ISO-8601, UTC."""
    phase: ClusterPhase
    generation: int
    step: int
    """The last committed one."""
    loss: float | None
    step_s: float | None
    samples_per_s: float | None
    waiting_for: str
    """In words, what has to happen next; empty while training runs."""
    pause_limited: bool = False
    """PAUSED for a while only: then the job goes back to a checkpoint, looks for one once more, or fails."""
    outcome: str
    planning: PlanningData | None
    snapshot: SnapshotState | None
    snapshot_policy: SnapshotPolicyState | None
    checkpoint: CheckpointState | None
    job: JobState | None
    pipelines: list[PipelineData]
    nodes: dict[str, NodeSummary]


class ClusterUnreachable(StateData, frozen=True, kw_only=True):
    """The coordinator's last will on ``cluster/state``: nobody coordinates; training goes on."""

    schema: int
    phase: Literal["UNREACHABLE"]
    reason: str
    nodes: dict[str, NodeSummary]
    """None are known."""
    coordinator: int | None = None
    """Its incarnation."""
    graceful: bool = False
    """It was stopped on purpose."""
