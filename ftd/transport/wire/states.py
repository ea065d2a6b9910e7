"""The cluster's state, as it is retained on ``cluster/state``."""

from typing import Literal

import msgspec

from ftd.transport.wire.event_details import PipelineData
from statemachine.messages.values import ClusterPhase, NodeState, QuarantineCause, StartupStage


class StateData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the cluster's state and its parts."""


class PlanningData(StateData, frozen=True, kw_only=True):
    """Progress of precomputing plans for several numbers of nodes; training may run meanwhile."""

    done: int
    total: int


class StartupState(StateData, frozen=True, kw_only=True):
    """Progress of the start, from the nodes' processes to a job's first step."""

    stage: StartupStage
    number: int
    """Number of this stage, from 1 on."""
    stages: int
    """Number of stages."""
    done: int
    total: int
    """Number of nodes, layers or plans of this stage in total; 0: it cannot be counted."""
    node: str | None
    """Node that builds or measures the model."""
    share: float
    """Share of the stages that are done, from 0 to 1."""
    text: str
    """The stage and its progress, in words."""


class SnapshotState(StateData, frozen=True, kw_only=True):
    """The newest snapshot that is complete on all nodes."""

    step: int
    generation: int
    at: str
    """ISO-8601, UTC."""
    size_bytes: int
    protection: str
    owners: int
    """Number of nodes that hold a part of it."""
    present: int
    """Number of these nodes that are still there."""
    missing: list[str]
    """Names of the nodes that are not there any more."""


class SnapshotPolicyState(StateData, frozen=True, kw_only=True):
    """The policy for the next snapshots."""

    every_steps: int
    """0: no snapshots at present."""
    auto_interval: bool
    protection: str
    auto_protection: bool


class CheckpointState(StateData, frozen=True, kw_only=True):
    """The newest persistent checkpoint that this job wrote or began from, and the one that is being written."""

    url: str
    step: int | None
    """Step of the newest checkpoint; null if there is none yet."""
    size_bytes: int
    writing_step: int | None
    every_steps: int = 0
    """Steps between two checkpoints, at least."""
    auto_interval: bool = False


class JobState(StateData, frozen=True, kw_only=True):
    """The current job, or the last one."""

    id: str
    name: str
    steps: int
    global_batch: int


class QuarantineState(StateData, frozen=True, kw_only=True):
    """A node's quarantine: it gets no work until it is readmitted."""

    cause: QuarantineCause
    at: str
    """ISO-8601, UTC."""
    reason: str
    readmit: str
    """Command that readmits the node."""


class HealthState(StateData, frozen=True, kw_only=True):
    """The last health check of a node."""

    at: str
    """ISO-8601, UTC."""
    problem: str
    """Problem that it found, in words; empty: none."""
    kind: str
    """Model of the devices."""
    compute_gflops: float | None
    """Speed of matrix products on the slowest device, in 10**9 operations a second; null: not measured."""
    memory_gb_s: float | None
    """Bandwidth of copies in the memory of the slowest device, in 10**9 bytes a second; null: not measured."""
    link_mb_s: float | None
    """Bandwidth of the quickest transfer from another host, in 10**6 bytes a second; null: not measured."""


class NodeSummary(StateData, frozen=True, kw_only=True):
    """A node, as the coordinator knows it."""

    state: NodeState
    incarnation: int
    devices: int
    host: str
    in_plan: bool
    draining: bool
    """Whether the node is to leave, or has left."""
    step: int
    speed: float
    """Speed relative to the other nodes; below 1 while the node is a straggler."""
    quarantine: QuarantineState | None = None
    """Present while the node is set aside."""
    health: HealthState | None = None
    """Present once a health check has ended."""
    drain_waits: str = ""
    """Reason why a node that is to leave stays for now: there is no plan without it."""


class ClusterState(StateData, frozen=True, kw_only=True):
    """The cluster's state, retained on ``cluster/state``."""

    schema: int
    version: str
    """Version of the coordinator."""
    coordinator: int
    """Incarnation of the coordinator that leads."""
    leader: str = ""
    """Name of the coordinator that leads."""
    term: int = 0
    """Term of the leader; rises by one with each takeover."""
    standbys: list[str] = []
    """Names of the coordinators that would take over, in this order."""
    ineligible: dict[str, str] = {}
    """Coordinators that are there and must not take over, each with the reason: another version of ftd."""
    at: str
    """ISO-8601, UTC."""
    phase: ClusterPhase
    generation: int
    step: int
    """The last committed step."""
    loss: float | None
    step_s: float | None
    samples_per_s: float | None
    waiting_for: str
    """Condition that has to be fulfilled next, in words; empty while training runs."""
    startup: StartupState | None = None
    """Progress of the start; null if nothing is starting."""
    pause_limited: bool = False
    """Whether the PAUSED phase has a time limit. Afterwards the job returns to a checkpoint, looks for one
    again, or fails.
    """
    outcome: str
    planning: PlanningData | None
    snapshot: SnapshotState | None
    snapshot_policy: SnapshotPolicyState | None
    checkpoint: CheckpointState | None
    job: JobState | None
    pipelines: list[PipelineData]
    nodes: dict[str, NodeSummary]


class ClusterUnreachable(StateData, frozen=True, kw_only=True):
    """The coordinator's last will on ``cluster/state``: nobody coordinates; training continues."""

    schema: int
    phase: Literal["UNREACHABLE"]
    reason: str
    nodes: dict[str, NodeSummary]
    """An object that is always empty."""
    coordinator: int | None = None
    """Incarnation of the last leader."""
    graceful: bool = False
    """Whether the coordinator was stopped on purpose."""
