"""Content of the journal: everything that a coordinator must know again after SIGKILL at any point.

It is plain data (JSON, msgpack). It includes the times of a recovery under way: the clock is the host's
monotonic one, the same for a coordinator that restarts on this host.

A write of the journal outlives its process. What is to outlive a power cut must be forced to the disk
(``durability_key``), which takes milliseconds, or tens of them, on the path of a recovery. So generations are
reserved ahead of time, many at once: a journal whose end was lost in a power cut continues after all generations
that the lost end may have used.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from planner.values import Plan
from statemachine.cluster.durable.records import (
    JournalState,
    NodeRecord,
    PersistingRecord,
    assemble,
)
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import (
    ActiveRecovery,
    Ended,
    Paused,
    Planning,
    Quiescing,
    Resuming,
    Running,
    State,
    TrainingGroup,
    Waiting,
)
from statemachine.cluster.rules import Resumption
from statemachine.cluster.snapshots.snapshot_state import CheckpointWrite, JobCheckpoints, JobSnapshots
from statemachine.cluster.state import Cluster, TrainingProgress
from statemachine.messages.values import PROTOCOL, ClusterPhase, NodeFacts
from statemachine.timing import Timing

T = TypeVar("T")

SCHEMA = 4
"""Schema that ``write`` produces. Raise it by one if an older program could not read the result."""
OLDEST = 3
"""Oldest schema that ``read`` accepts."""
RESERVED = 64
"""Generations reserved at once: more than a recovery that fails again and again uses before the next
reservation.
"""

_MOVING = (ClusterPhase.QUIESCING, ClusterPhase.RECOVERING, ClusterPhase.RUNNING)


class InvalidJournalError(ValueError):
    """The journal is corrupt, or belongs to another program or version."""


def incompatibility(schema: int, protocol: int, newest: int | None = None) -> str:
    """Return why a program cannot read another program's journal; an empty string if it can.

    :param schema: schema of the journal.
    :param protocol: protocol of its writer's nodes.
    :param newest: schema that the program writes; this program's if not given.
    """
    newest = SCHEMA if newest is None else newest
    if not OLDEST <= schema <= newest:
        readable = str(newest) if newest == OLDEST else f"{OLDEST} to {newest}"
        return f"the journal has schema {schema}, and this program reads {readable}"
    if protocol != PROTOCOL:
        return f"the nodes speak protocol {protocol}, and this program {PROTOCOL}"
    return ""


def _field_names(kind: type, *left_out: str) -> tuple[str, ...]:
    """Return the names of a dataclass's fields but ``left_out``."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in left_out)


_FACTS = NodeFacts.__struct_fields__
_STATUS_FIELDS = _field_names(NodeRecord, "incarnation", "facts", "snapshots")
_RECOVERY_FIELDS = _field_names(ActiveRecovery, "before", "committed_at")
_REPLICAS_FIELDS = ("agreed_step", "copied", "diverged", "diverged_step", "tries")
_PLAN_FIELDS = tuple(name for name in Plan.__struct_fields__ if name != "pipelines")
_RESUMED_FIELDS = _field_names(Resumption, "plan")
"""Fields of ``Resumption`` that the journal has under their names with ``resumed_`` before them."""
_PROGRESS_FIELDS = ("known", "published_step", "evaluated", "skipped", "loss", "step_s")
_CLUSTER_FIELDS = (
    "generation",
    "raised",
    "repeated_error",
    "last_failure",
    "job",
    "profiled",
    "spikes",
    "lineage",
)
"""Fields of ``TrainingProgress`` and ``Cluster`` that the journal has under the same names."""


def _values(source: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes by their names."""
    return {name: getattr(source, name) for name in names}


def columns(values: Sequence[Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return these attributes (two at least) of ``values``, each in a list of its own, in their order.

    A value that a thousand nodes share costs next to nothing in a column, neither to write nor to compress.
    """
    if not values:
        return {name: [] for name in names}
    return dict(zip(names, map(list, zip(*map(attrgetter(*names), values), strict=True)), strict=True))


def _nodes(c: Cluster) -> dict[str, Any]:
    """Return the nodes in three parts: what a Hello says of them, what they hold, and the rest, which a
    recovery changes.
    """
    nodes = list(c.nodes.values())
    incarnations, facts = [node.incarnation for node in nodes], [node.facts for node in nodes]
    held = [node.snapshots for node in nodes]
    return {
        "hosts": _cached(c, "hosts", (list(c.nodes), incarnations, facts), _hosts),
        "nodes": columns(nodes, _STATUS_FIELDS),
        "held": _cached(c, "held", held, list),
    }


def _hosts(said: tuple[list[str], list[int], list[NodeFacts]]) -> dict[str, Any]:
    names, incarnations, facts = said
    return {"name": names, "incarnation": incarnations, "facts": columns(facts, _FACTS)}


MOMENTS = ("began_at", "detected_at", "waited_until", "quiesced_at", "planned_at", "resumed_at")
"""Times of a recovery that separate its phases."""


def _persisting(c: Cluster) -> dict[str, Any]:
    persisting, writing = c.checkpoints, c.checkpoints.writing
    return {
        "newest": persisting.newest,
        "tried": persisting.last_tried_step,
        "done": persisting.final_abandoned,
        "corrupt_steps": sorted(persisting.corrupt_steps),
        "exported_step": persisting.exported_step,
        "attempt": writing.attempt if writing is not None else "",
        "record": writing.record if writing is not None else None,
        "writers": sorted(writing.shares) if writing is not None else [],
    }


def _read_persisting(past: PersistingRecord, at: float) -> JobCheckpoints:
    """Return the past checkpoints. What was being written is abandoned once the broker is connected, so this
    much of it is enough.
    """
    writing = None
    if past.record is not None:
        writing = CheckpointWrite(
            record=past.record,
            attempt=past.attempt,
            shares=dict.fromkeys(past.writers, ()),
            incarnations={},
            sources={},
            began_at=at,
        )
    return JobCheckpoints(
        newest=past.newest,
        last_tried_step=past.tried,
        final_abandoned=past.done,
        corrupt_steps=set(past.corrupt_steps),
        writing=writing,
        exported_step=past.exported_step,
    )


def _cached(c: Cluster, name: str, value: T, make: Callable[[T], Any]) -> Any:
    """Return what ``make`` makes of a large value, cached for as long as the value is the same object or equal."""
    cached = c.cached_parts.get(name)
    if cached is None or not (cached[0] is value or cached[0] == value):
        cached = c.cached_parts[name] = (value, make(value))
    return cached[1]


def _resumption(c: Cluster, resumption: Resumption) -> dict[str, Any]:
    values = {f"resumed_{name}": getattr(resumption, name) for name in _RESUMED_FIELDS}
    return values | {
        "resumed_ready": _cached(c, "ready", resumption.ready, lambda ready: list(ready.items())),
        "resumed_ready_parts": _cached(
            c, "ready_parts", resumption.ready_parts, lambda parts: list(parts.items())
        ),
        "resumed_replica_peers": dict(resumption.replica_peers),
        "pipelines": resumption.plan.pipelines,
        "plan": _cached(c, "plan", resumption.plan, lambda plan: _values(plan, _PLAN_FIELDS)),
    }


def write(c: Cluster) -> dict[str, Any]:
    """Return the current durable state, for ``msgspec`` to encode; the events to be published go with it
    (``outbox``).

    Large parts that have not changed since the last call are the same objects; none changes once it was
    returned.
    """
    phase, resumption = c.state, c.resumption
    paused = phase if isinstance(phase, Paused) else None
    record = c.recovery if paused is None else paused.interrupted
    state: dict[str, Any] = {
        "schema": SCHEMA,
        "phase": str(c.phase),
        "outcome": phase.outcome if isinstance(phase, Ended) else "",
        "pause_reason": paused.reason if paused is not None else "",
        "pause_limited": paused is not None and paused.pause_limited,
        "failing": dict(c.failing),
        **_values(c, _CLUSTER_FIELDS),
        **_values(c.progress, _PROGRESS_FIELDS),
        **_nodes(c),
        "templates_for": max(c.templates_for, c.templates_before),
        "exposure": msgspec.to_builtins(c.exposure),
        "snapshot": c.snapshots.newest,
        "snapshot_last_order_step": c.snapshots.last_order_step,
        "snapshot_user_requested": c.snapshots.user_requested
        or (c.snapshots.pending is not None and c.snapshots.pending.user_requested),
        "replicas": _values(c.replicas, _REPLICAS_FIELDS),
        "persisting": _persisting(c),
        "quarantine": {
            node.name: {"failures": node.failures, "quarantine": node.quarantine}
            for node in c.nodes.values()
            if node.failures or node.quarantine is not None
        },
    }
    if not isinstance(phase, Waiting | Ended):
        group = phase if isinstance(phase, TrainingGroup) else None
        state["attempt"] = {
            "generation": phase.generation,
            "mode": phase.mode if isinstance(phase, Quiescing | Planning) else "abort",
            "resume_sent": group is not None,
            "sources": [] if isinstance(phase, Quiescing) else list(phase.sources),
        }
        state["members"] = members = _cached(c, "members", c.members.copy(), sorted)
        expected = members if isinstance(phase, TrainingGroup) else list(phase.expected)
        state["expected"] = _cached(c, "expected", expected, list)
    if record is not None:
        state["recovery"] = _values(record, _RECOVERY_FIELDS) | {"nodes": list(record.nodes)}
        state["before"] = record.before
    if resumption is not None:
        state |= _resumption(c, resumption)
    return state


def durability_key(parts: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of the durable state; the state is forced to the disk if the key differs from the one last
    forced, or if its generation is not reserved.

    Everything else can be lost: nodes know the newest steps, and a generation that no node was ordered to
    resume is decided again. But only the journal knows which nodes continued with which plan.

    :param parts: result of ``write``.
    """
    job, snapshot = parts["job"], parts["snapshot"]
    return (
        "" if parts["phase"] in _MOVING else parts["phase"],
        job and job.job_id,
        snapshot and (snapshot.generation, snapshot.step),
        parts.get("resumed_generation"),
    )


def shift_clock(durable: dict[str, Any], by_s: float) -> dict[str, Any]:
    """Return the state on another host's monotonic clock, which is ``by_s`` ahead of the writer's."""
    state = dict(durable)
    recovery = [("recovery", field) for field in MOMENTS]
    for name, field in (*recovery, ("exposure", "since"), ("snapshot", "at")):
        part = state.get(name)
        if isinstance(part, dict) and isinstance(part.get(field), float):
            state[name] = {**part, field: part[field] + by_s}
    quarantine = state.get("quarantine")
    if isinstance(quarantine, dict):
        state["quarantine"] = _shifted(quarantine, by_s)
    return state


def _shifted(value: Any, by_s: float) -> Any:
    """Return plain data with each number under a key ``at`` raised by ``by_s``."""
    if isinstance(value, dict):
        return {
            key: one + by_s if key == "at" and isinstance(one, float) else _shifted(one, by_s)
            for key, one in value.items()
        }
    return [_shifted(one, by_s) for one in value] if isinstance(value, list | tuple) else value


def raise_generation(durable: dict[str, Any], generation: int) -> dict[str, Any]:
    """Return the state with its generation raised to ``generation``, up to which generations may have been
    used unknown to it.
    """
    known = durable.get("generation")
    return {**durable, "generation": max(known, generation)} if isinstance(known, int) else durable


UNSEEN = 1000
"""Generations left out in case the last leader started some that only it and the broker knew of."""
UNSEEN_RANGES = 97
"""Number of ranges of that size from which a coordinator chooses one."""


def skip_unseen_generations(durable: dict[str, Any], incarnation: int) -> dict[str, Any]:
    """Return a journal that may not be the newest, changed so that no generation started after it is used for
    another plan.

    :param incarnation: incarnation of the coordinator that is to lead. Several may begin from the same old
        journal, one after another, if the broker returns with it more than once; they leave out different
        numbers.
    """
    generation = durable.get("generation")
    if not isinstance(generation, int):
        return durable
    return raise_generation(durable, generation + UNSEEN * (1 + incarnation % UNSEEN_RANGES))


def read(timing: Timing, durable: dict[str, Any], at: float) -> Cluster:
    """Return the cluster as the journal left it; every node counts as just heard.

    :raises InvalidJournalError: the journal does not fit this program.
    """
    schema = durable.get("schema") if isinstance(durable, dict) else None
    if isinstance(schema, int) and (problem := incompatibility(schema, PROTOCOL)):
        raise InvalidJournalError(problem)
    try:
        return _read_cluster(timing, msgspec.convert(assemble(durable), JournalState), at)
    except ValueError as error:
        raise InvalidJournalError(f"the coordinator's journal cannot be read: {error}") from error


def _read_cluster(timing: Timing, journal: JournalState, at: float) -> Cluster:
    """Return the cluster of a journal.

    :raises ValueError: a part that belongs to the phase is missing.
    """
    c = Cluster(
        timing=timing,
        failing=journal.failing,
        **_values(journal, _CLUSTER_FIELDS),
        progress=TrainingProgress(**_values(journal, _PROGRESS_FIELDS)),
        from_journal=True,
        at=at,
        templates_before=journal.templates_for,
        snapshots=JobSnapshots(
            newest=journal.snapshot,
            last_order_step=journal.snapshot_last_order_step,
            urgent=True,
            user_requested=journal.snapshot_user_requested,
        ),
        checkpoints=_read_persisting(journal.persisting, at),
        replicas=journal.replicas,
        exposure=dataclasses.replace(journal.exposure, since=min(journal.exposure.since, at)),
    )
    for name, record in journal.nodes.items():
        c.nodes[name] = NodeMachine(
            name=name,
            incarnation=record.incarnation,
            facts=record.facts,
            heard_at=at,
            snapshots=frozenset(record.snapshots),
            **_values(record, _STATUS_FIELDS),
            repairs=None,
        )
    for name, past in journal.quarantine.items():
        if name in c.nodes:
            failures = tuple(replace(failure, at=min(failure.at, at)) for failure in past.failures)
            c.nodes[name].failures, c.nodes[name].quarantine = failures, past.quarantine
    if journal.plan is not None:
        values = {name: getattr(journal, f"resumed_{name}") for name in _RESUMED_FIELDS}
        values["ready"] = {device: frozenset(layers) for device, layers in journal.resumed_ready}
        values["ready_parts"] = dict(journal.resumed_ready_parts)
        c.resumption = Resumption(plan=journal.plan, **values)
    c.state = _read_state(journal, c.resumption, at)
    return c


def _read_recovery(journal: JournalState, at: float) -> ActiveRecovery | None:
    old = journal.recovery
    if old is None:
        return None
    known = {name: moment for name in MOMENTS if (moment := getattr(old, name)) is not None}
    return dataclasses.replace(old, **{name: min(moment, at) for name, moment in known.items()})


def _read_state(journal: JournalState, resumption: Resumption | None, at: float) -> State:
    """Return the state of the phase. Reports are not stored: a generation that was not resumed must begin
    again.

    :raises ValueError: a part that belongs to the phase is missing.
    """
    phase, past = journal.phase, journal.attempt
    if phase is ClusterPhase.WAITING:
        return Waiting()
    if phase in (ClusterPhase.FINISHED, ClusterPhase.FAILED):
        return Ended(phase=phase, outcome=journal.outcome)
    if past is None:
        raise ValueError(f"it has no generation in phase {phase}")
    expected = dict.fromkeys(past.expected)
    if phase is ClusterPhase.PAUSED:
        return Paused(
            generation=past.generation,
            expected=expected,
            members=set(past.members),
            sources=past.sources,
            reason=journal.pause_reason,
            pause_limited=journal.pause_limited,
            interrupted=_read_recovery(journal, at),
        )
    recovery = _read_recovery(journal, at)
    if past.resume_sent and resumption is not None:
        group: dict[str, Any] = {
            "generation": past.generation,
            "began_at": at,
            "members": set(past.members),
            "resumption": resumption,
            "planned": resumption.plan.nodes,
            "sources": past.sources,
        }
        if phase is ClusterPhase.RUNNING:
            return Running(recovery=recovery, **group)
        if recovery is not None:
            return Resuming(recovery=recovery, **group)
    if recovery is None:
        raise ValueError(f"it has no recovery in phase {phase}")
    return Quiescing(
        generation=past.generation, recovery=recovery, mode=past.mode, began_at=at, expected=expected
    )
