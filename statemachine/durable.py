"""The journal's content: everything a coordinator must know again after SIGKILL at any point.

Plain data (JSON, msgpack). Timings of a recovery under way are kept too: the clock is the host's monotonic
one, the same for a coordinator that comes back on this host.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from planner.values import Device, Plan, StatePart
from statemachine.node import NodeMachine
from statemachine.rules import Resumption
from statemachine.state import Attempt, Cluster, Exposure, Keeping, Ledger, Recovery
from statemachine.timing import Timing
from statemachine.values import (
    ClusterPhase,
    CommittedStep,
    HeldPart,
    HeldSnapshot,
    Job,
    NodeFacts,
    NodeState,
    Profiled,
    QuiesceMode,
    Restore,
    Snapshot,
    Vote,
)

SCHEMA = 1


class JournalError(ValueError):
    """The journal is not of this program, or of another version of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    incarnation: int
    facts: NodeFacts
    state: NodeState
    prepared: bool
    unfit: str | None
    draining: str | None
    leaving: bool
    released: bool
    returning: bool
    counted_in: int
    obeyed: int
    lost_after: int
    gone: bool
    retired: tuple[int, ...]
    speed: float = 1.0
    snapshots: tuple[HeldSnapshot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    generation: int
    mode: QuiesceMode
    expected: tuple[str, ...]
    members: tuple[str, ...]
    kept: tuple[str, ...]
    resume_sent: bool
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    cause: str
    nodes: tuple[str, ...]
    detected_how: str | None
    detected_at: float
    tried: int
    recomputed_steps: int
    pipelines_before: list[dict[str, Any]]
    rolled_back_steps: int = 0
    tier: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposureRecord:
    failures: int = 0
    node_s: float = 0.0
    nodes: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    schema: int
    phase: ClusterPhase
    generation: int
    outcome: str
    lacking: str
    giving_up: bool
    raised: int
    last_failure: str
    job: Job | None
    profiled: Profiled | None
    known: CommittedStep | None
    told: int
    loss: float | None
    step_s: float
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    attempt: AttemptRecord | None = None
    recovery: RecoveryRecord | None = None
    resumed_generation: int = 0
    resumed_step: int = 0
    resumed_vote: Vote | None = None
    resumed_ready: tuple[tuple[Device, tuple[int, ...]], ...] = ()
    plan: Plan | None = None
    templates_for: int = 0
    exposure: ExposureRecord = ExposureRecord()
    snapshot: Snapshot | None = None
    snapshot_behind: int = 0
    lineage: int = 0
    resumed_lineage: int = 0
    resumed_restore: Restore | None = None
    resumed_ready_parts: tuple[tuple[Device, tuple[StatePart, ...]], ...] = ()
    resumed_held_parts: tuple[HeldPart, ...] = ()
    untold: dict[str, Any] | None = None


def _node(node: NodeMachine) -> dict[str, Any]:
    facts = node.facts
    return {
        "incarnation": node.incarnation,
        "facts": {
            "devices": facts.devices,
            "host": facts.host,
            "rendezvous_port": facts.rendezvous_port,
            "chaos_allowed": facts.chaos_allowed,
            "snapshot_port": facts.snapshot_port,
        },
        "state": str(node.state),
        "prepared": node.prepared,
        "unfit": node.unfit,
        "draining": node.draining,
        "leaving": node.leaving,
        "released": node.released,
        "returning": node.returning,
        "counted_in": node.counted_in,
        "obeyed": node.obeyed,
        "lost_after": node.lost_after,
        "gone": node.gone,
        "retired": list(node.retired),
        "speed": node.speed,
        "snapshots": [
            {"job_id": held.job_id, "step": held.step, "generation": held.generation}
            for held in sorted(node.snapshots, key=lambda held: (held.generation, held.step))
        ],
    }


def _plain(c: Cluster, name: str, value: Any) -> Any:
    """A large immutable value as plain data, made once."""
    cached = c.plain.get(name)
    if cached is None or cached[0] is not value:
        cached = (value, msgspec.to_builtins(value))
        c.plain[name] = cached
    return cached[1]


def _resumption(c: Cluster, resumption: Resumption) -> dict[str, Any]:
    return {
        "resumed_generation": resumption.generation,
        "resumed_step": resumption.step,
        "resumed_vote": msgspec.to_builtins(resumption.vote),
        "resumed_ready": [
            [{"node": device.node, "index": device.index}, sorted(layers)]
            for device, layers in resumption.ready.items()
        ],
        "plan": _plain(c, "plan", resumption.plan),
        "resumed_lineage": resumption.lineage,
        "resumed_restore": _plain(c, "restore", resumption.restore),
        "resumed_ready_parts": [
            msgspec.to_builtins((device, parts)) for device, parts in resumption.ready_parts.items()
        ],
        "resumed_held_parts": _plain(c, "held_parts", resumption.held_parts),
    }


def write(c: Cluster) -> dict[str, Any]:
    """The durable state as it is now. ``told`` lags by the step under way: its events are yet to go out."""
    attempt, record, resumption, ledger = c.attempt, c.recovery, c.resumption, c.ledger
    state: dict[str, Any] = {
        "schema": SCHEMA,
        "phase": str(c.phase),
        "generation": c.generation,
        "outcome": c.outcome,
        "lacking": c.lacking,
        "giving_up": c.giving_up,
        "raised": c.raised,
        "last_failure": c.last_failure,
        "job": _plain(c, "job", c.job),
        "profiled": _plain(c, "profiled", c.profiled),
        "known": msgspec.to_builtins(ledger.known),
        "told": c.told_before,
        "loss": ledger.loss,
        "step_s": ledger.step_s,
        "nodes": {name: _node(node) for name, node in c.nodes.items()},
        "templates_for": max(c.templates_for, c.templates_before),
        "exposure": msgspec.to_builtins(c.exposure),
        "snapshot": _plain(c, "snapshot", c.keeping.newest),
        "snapshot_behind": c.keeping.behind,
        "lineage": c.lineage,
        "untold": c.untold,
    }
    if attempt is not None:
        state["attempt"] = {
            "generation": attempt.generation,
            "mode": attempt.mode,
            "expected": list(attempt.expected),
            "members": sorted(attempt.members),
            "kept": sorted(attempt.kept),
            "resume_sent": attempt.resume_sent,
            "sources": list(attempt.sources),
        }
    if record is not None:
        state["recovery"] = {
            "cause": record.cause,
            "nodes": list(record.nodes),
            "detected_how": record.detected_how,
            "detected_at": record.detected_at,
            "tried": record.tried,
            "recomputed_steps": record.recomputed_steps,
            "rolled_back_steps": record.rolled_back_steps,
            "tier": record.tier,
            "pipelines_before": record.pipelines_before,
        }
    if resumption is not None:
        state |= _resumption(c, resumption)
    return state


def read(timing: Timing, durable: dict[str, Any], at: float) -> Cluster:
    """A cluster as the journal left it; every node counts as just heard.

    :raises JournalError: the journal does not fit this program.
    """
    try:
        journal = msgspec.convert(durable, Journal)
    except msgspec.ValidationError as error:
        raise JournalError(f"the coordinator's journal cannot be read: {error}") from error
    if journal.schema != SCHEMA:
        raise JournalError(
            f"the coordinator's journal has schema {journal.schema}, this program writes {SCHEMA}"
        )
    c = Cluster(
        timing=timing,
        phase=journal.phase,
        generation=journal.generation,
        outcome=journal.outcome,
        lacking=journal.lacking,
        giving_up=journal.giving_up,
        raised=journal.raised,
        last_failure=journal.last_failure,
        job=journal.job,
        profiled=journal.profiled,
        ledger=Ledger(known=journal.known, told=journal.told, loss=journal.loss, step_s=journal.step_s),
        restored=True,
        at=at,
        told_before=journal.told,
        templates_before=journal.templates_for,
        keeping=Keeping(newest=journal.snapshot, behind=journal.snapshot_behind),
        lineage=journal.lineage,
        untold=journal.untold,
        exposure=Exposure(
            failures=journal.exposure.failures,
            node_s=journal.exposure.node_s,
            nodes=journal.exposure.nodes,
            since=min(journal.exposure.since, at),
        ),
    )
    _read_generation(c, journal)
    return c


def _read_generation(c: Cluster, journal: Journal) -> None:
    """Nodes, and what the present generation is about."""
    at = c.at
    for name, record in journal.nodes.items():
        c.nodes[name] = _read_node(name, record, at)
    if journal.plan is not None:
        c.resumption = Resumption(
            generation=journal.resumed_generation,
            step=journal.resumed_step,
            vote=journal.resumed_vote,
            plan=journal.plan,
            ready={device: frozenset(layers) for device, layers in journal.resumed_ready},
            lineage=journal.resumed_lineage,
            restore=journal.resumed_restore,
            ready_parts=dict(journal.resumed_ready_parts),
            held_parts=journal.resumed_held_parts,
        )
    if journal.attempt is not None:
        past = journal.attempt
        c.attempt = Attempt(
            generation=past.generation,
            mode=past.mode,
            began_at=at,
            expected=past.expected,
            members=set(past.members),
            kept=frozenset(past.kept),
            resume_sent=past.resume_sent,
            sources=past.sources,
        )
    if journal.recovery is not None:
        old = journal.recovery
        c.recovery = Recovery(
            cause=old.cause,
            nodes=list(old.nodes),
            detected_how=old.detected_how,
            detected_at=min(old.detected_at, at),
            tried=old.tried,
            recomputed_steps=old.recomputed_steps,
            rolled_back_steps=old.rolled_back_steps,
            tier=old.tier,
            pipelines_before=old.pipelines_before,
        )


def _read_node(name: str, record: NodeRecord, at: float) -> NodeMachine:
    node = NodeMachine(
        name=name,
        incarnation=record.incarnation,
        facts=record.facts,
        state=record.state,
        heard_at=at,
        prepared=record.prepared,
        unfit=record.unfit,
        draining=record.draining,
        leaving=record.leaving,
        released=record.released,
        returning=record.returning,
        counted_in=record.counted_in,
        obeyed=record.obeyed,
        lost_after=record.lost_after,
        gone=record.gone,
        speed=record.speed,
        snapshots=set(record.snapshots),
    )
    node.retired.extend(record.retired)
    return node
