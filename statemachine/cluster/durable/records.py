"""Records of the durable state as the journal has it; ``durable`` writes it and reads it back."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from planner.values import Device, Plan, StatePart
from statemachine.cluster.horizon import Exposure
from statemachine.cluster.loss_spikes import LossSpikes
from statemachine.cluster.phases import ActiveRecovery
from statemachine.cluster.skipped_updates import SkippedUpdates
from statemachine.cluster.state import ReplicaComparisons
from statemachine.messages.values import (
    CheckpointRecord,
    ClusterPhase,
    CommittedStep,
    HeldPart,
    HeldSnapshot,
    Job,
    NodeErrors,
    NodeFacts,
    NodeFailure,
    NodeState,
    ProfiledJob,
    Quarantine,
    QuiesceMode,
    RepeatedError,
    Restore,
    Snapshot,
    Vote,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    incarnation: int
    facts: NodeFacts
    state: NodeState
    prepared: bool
    build_error: str | None
    draining: str | None
    leaving: bool
    released: bool
    returning: bool
    counted_in: int
    obeyed: int
    lost_after: int
    ended: bool
    retired: tuple[int, ...]
    speed: float = 1.0
    snapshots: tuple[HeldSnapshot, ...] = ()
    drain_granted: bool = False
    drain_waits: str = ""
    fenced: bool = False
    health_pending: bool = False
    judged_check: int = 0
    suspected: bool = False
    trainers_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRecord:
    """Failures of a node that count, and its quarantine if it is set aside."""

    failures: tuple[NodeFailure, ...] = ()
    quarantine: Quarantine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    generation: int
    mode: QuiesceMode
    expected: tuple[str, ...]
    members: tuple[str, ...]
    resume_sent: bool
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistingRecord:
    newest: CheckpointRecord | None = None
    tried: int = 0
    done: bool = False
    corrupt_steps: tuple[int, ...] = ()
    exported_step: int = 0
    attempt: str = ""
    """Attempt that is being written; empty: none."""
    record: Snapshot | None = None
    """Snapshot that is being written."""
    writers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostColumns:
    name: list[str]
    incarnation: list[Any]
    facts: dict[str, list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalParts:
    """Parts of the durable state that change at different times.

    For all nodes, in one order: what each reported of itself, its status, and what it holds.
    """

    hosts: HostColumns
    nodes: dict[str, list[Any]]
    held: list[Any]
    attempt: dict[str, Any] | None = None
    expected: Any = ()
    members: Any = ()
    recovery: dict[str, Any] | None = None
    before: Any = ()
    plan: dict[str, Any] | None = None
    pipelines: Any = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    schema: int
    phase: ClusterPhase
    generation: int
    outcome: str
    pause_reason: str
    pause_limited: bool
    raised: int
    last_failure: str
    job: Job | None
    profiled: ProfiledJob | None
    known: CommittedStep | None
    published_step: int
    loss: float | None
    step_s: float
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    attempt: GenerationRecord | None = None
    recovery: ActiveRecovery | None = None
    resumed_generation: int = 0
    resumed_step: int = 0
    resumed_vote: Vote | None = None
    resumed_ready: tuple[tuple[Device, tuple[int, ...]], ...] = ()
    plan: Plan | None = None
    templates_for: int = 0
    exposure: Exposure = field(default_factory=Exposure)
    snapshot: Snapshot | None = None
    snapshot_last_order_step: int = 0
    snapshot_user_requested: bool = False
    lineage: int = 0
    resumed_lineage: int = 0
    resumed_restore: Restore | None = None
    resumed_protection: str = ""
    resumed_requested_protection: str = ""
    resumed_ready_parts: tuple[tuple[Device, tuple[StatePart, ...]], ...] = ()
    resumed_held_parts: tuple[HeldPart, ...] = ()
    resumed_replica_peers: dict[str, str] = field(default_factory=dict)
    persisting: PersistingRecord = PersistingRecord()
    repeated_error: RepeatedError | None = None
    failing: dict[str, NodeErrors] = field(default_factory=dict)
    replicas: ReplicaComparisons = field(default_factory=ReplicaComparisons)
    evaluated: int = 0
    resumed_evaluated: int = 0
    quarantine: dict[str, QuarantineRecord] = field(default_factory=dict)
    """Nodes with failures that count, or that are set aside."""
    skipped: SkippedUpdates = field(default_factory=SkippedUpdates)
    spikes: LossSpikes = field(default_factory=LossSpikes)


def assemble(durable: Any) -> dict[str, Any]:
    """Return the durable state as ``JournalState`` has it, with a row for each node.

    :raises ValueError: a part is missing, or the nodes' columns differ in length.
    """
    written = msgspec.convert(durable, JournalParts)
    hosts = written.hosts
    nodes = {
        name: {**standing, "incarnation": incarnation, "facts": facts, "snapshots": held}
        for name, incarnation, facts, standing, held in zip(
            hosts.name, hosts.incarnation, rows(hosts.facts), rows(written.nodes), written.held, strict=True
        )
    }
    whole: dict[str, Any] = {**durable, "nodes": nodes}
    if written.attempt is not None:
        whole["attempt"] = {**written.attempt, "expected": written.expected, "members": written.members}
    if written.recovery is not None:
        whole["recovery"] = {**written.recovery, "before": written.before}
        if whole["recovery"].get("began_at") is None:  # An older program measured it from the detection.
            whole["recovery"]["began_at"] = whole["recovery"].get("detected_at")
    if written.plan is not None:
        whole["plan"] = {**written.plan, "pipelines": written.pipelines}
    return whole


def rows(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table of columns, as plain data.

    :raises ValueError: the columns differ in length.
    """
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
