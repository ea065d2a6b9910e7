"""Membership of the cluster: Hello, rejection, loss, return, fencing, removal.

The sender's status (``SenderStatus``) and the kind of signal together decide how a signal is handled; the
table below covers every pair.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import get_args

from msgspec.structs import replace

from planner.reasons import count_noun
from planner.values import Policy
from statemachine.cluster.node import MAX_RETIRED, NodeEvent, NodeMachine
from statemachine.cluster.phases import Paused, Planning, Quiescing, Running, TrainingGroup
from statemachine.cluster.recovery_times import note_time_of_failure
from statemachine.cluster.state import Cluster
from statemachine.effects import RemoveNode
from statemachine.messages.cluster import Fence, Heartbeat, Hello, Prepare, Reject, RequestHello, Signal
from statemachine.messages.common import (
    OptimizerReplicaDiverged,
    PeerSuspected,
    ReplicaDigests,
    SnapshotStarted,
)
from statemachine.messages.values import PROTOCOL, NodeFacts, NodeState


class SenderStatus(StrEnum):
    CURRENT = "CURRENT"
    """The known incarnation of this name, not OFFLINE."""
    ABSENT = "ABSENT"
    """The known incarnation of this name, declared OFFLINE."""
    RETIRED = "RETIRED"
    """An incarnation of this name that is over (fenced, replaced)."""
    OTHER = "OTHER"
    """A different incarnation from the known one, never seen before."""
    UNKNOWN = "UNKNOWN"
    """No node of this name is known."""


class SignalAction(StrEnum):
    TAKE = "TAKE"
    """Handle the signal."""
    ADMIT = "ADMIT"
    """A newcomer: admit it, or reject it."""
    RETURN = "RETURN"
    """The node was declared OFFLINE and is alive: take it back if that is safe, fence it otherwise."""
    FENCE = "FENCE"
    INQUIRE = "INQUIRE"
    """Ask for a Hello."""
    IGNORE = "IGNORE"
    """Count and log the stale signal, and do nothing else."""


_A = SignalAction

# In the order of ``SenderStatus``: (CURRENT, ABSENT, RETIRED, OTHER, UNKNOWN).
_REPORT = (_A.TAKE, _A.RETURN, _A.IGNORE, _A.IGNORE, _A.INQUIRE)
"""A report that shows that its sender is alive; a Hello repeats it."""
_HINT = (_A.TAKE, _A.IGNORE, _A.IGNORE, _A.IGNORE, _A.IGNORE)
_ROWS: dict[type[Signal], tuple[_A, _A, _A, _A, _A]] = {
    Hello: (_A.TAKE, _A.RETURN, _A.FENCE, _A.ADMIT, _A.ADMIT),
    Heartbeat: (_A.TAKE, _A.RETURN, _A.FENCE, _A.INQUIRE, _A.INQUIRE),
    PeerSuspected: _HINT,
    ReplicaDigests: _HINT,
    OptimizerReplicaDiverged: _HINT,
    SnapshotStarted: _HINT,
}
"""Signals that are no reports."""

TABLE: dict[tuple[type[Signal], SenderStatus], SignalAction] = {
    (signal, status): action
    for signal in get_args(Signal)
    for status, action in zip(SenderStatus, _ROWS.get(signal, _REPORT), strict=True)
}


def sender_status(c: Cluster, name: str, incarnation: int) -> SenderStatus:
    node = c.nodes.get(name)
    if node is None:
        return SenderStatus.UNKNOWN
    if incarnation == node.incarnation:
        return SenderStatus.CURRENT if node.alive else SenderStatus.ABSENT
    return SenderStatus.RETIRED if incarnation in node.retired else SenderStatus.OTHER


def device_mismatch(facts: NodeFacts, policy: Policy, before: int = 0) -> str | None:
    """Return why a node with these devices cannot take part in a job with this policy, or ``None`` if it can.

    :param before: number of devices of this name's node when it took part; 0 if it never did.
    """
    wanted = policy.devices_per_node
    if facts.devices == wanted:
        return None
    has = f"this node has {count_noun(facts.devices, 'device')}"
    if before == wanted:
        has += f" and had {before} before"
        remedy = "see whether a device has failed, " if facts.devices < before else ""
    else:
        remedy = ""
    return (
        f"{has}, but every node of the running job has {wanted}: {remedy}set node.devices = {wanted} and restart "
        f"the node, or stop the job and submit it again for nodes of {count_noun(facts.devices, 'device')}"
    )


def admission_problem(c: Cluster, name: str, facts: NodeFacts) -> str | None:
    """Return why this coordinator cannot understand a node, or the other nodes would not admit it and be
    delayed; else ``None``.
    """
    if facts.protocol != PROTOCOL:
        return (
            f"it speaks protocol {facts.protocol}, and this coordinator {PROTOCOL}: install the same version "
            "of ftd on all hosts"
        )
    others = [
        node
        for node in c.nodes.values()
        if node.alive and node.facts.secret_fingerprint and node.name != name
    ]
    if (
        facts.secret_fingerprint
        and others
        and all(node.facts.secret_fingerprint != facts.secret_fingerprint for node in others)
    ):
        return (
            f"its secret differs from that of {others[0].name}: use the same secret (secret_file) on all nodes, "
            "and restart the node that had another one"
        )
    return None


def reject(c: Cluster, name: str, incarnation: int, reason: str) -> None:
    c.send_to(name, incarnation, Reject(reason=reason))
    if c.rejected.get((name, incarnation)) != reason:
        c.rejected[name, incarnation] = reason
        c.emit("NodeRejected", reason, node=name, incarnation=incarnation)


def admit(c: Cluster, name: str, incarnation: int, hello: Hello) -> bool:
    """Admit a newcomer under this name, or reject it; the caller has made sure that no live node has the name."""
    job = c.job if c.active else None
    problem = admission_problem(c, name, hello.facts)
    if problem is None and job is not None:
        known = c.nodes.get(name)
        problem = device_mismatch(hello.facts, job.policy, 0 if known is None else known.facts.devices)
    if problem is not None:
        reject(c, name, incarnation, problem)
        return False
    if job is not None and hello.job_id == job.job_id and hello.generation > 0 and hello.prepared:
        # It holds state of this job that this coordinator's journal does not account for.
        fence(
            c, name, incarnation, "its state belongs to a part of the job that this coordinator does not know"
        )
        return False
    old = c.nodes.get(name)
    node = NodeMachine(
        name=name,
        incarnation=incarnation,
        facts=hello.facts,
        health_pending=c.hardware.health.enabled and hello.facts.checks_health,
    )
    if old is not None:
        node.retired = (*old.retired, old.incarnation)[-MAX_RETIRED:]
        _continue_drain(c, old, node)
        node.failures, node.quarantine, node.needed_by = old.failures, old.quarantine, old.needed_by
    c.nodes[name] = node
    c.rejected.pop((name, incarnation), None)
    note_joined(c, node, f"{name} at {hello.facts.host} with {count_noun(hello.facts.devices, 'device')}")
    return True


def _continue_drain(c: Cluster, old: NodeMachine, new: NodeMachine) -> None:
    """Continue a drain under the new incarnation of a node that was fenced: nobody restarted its daemon.

    A node whose daemon was restarted, or that left by itself, takes part again.
    """
    if old.draining is None or old.leaving:
        return
    if old.fenced:
        new.draining = old.draining
    elif not old.released:
        c.emit("NodeDrainCancelled", f"{old.name} was restarted, which ends its drain", node=old.name)


def may_return(c: Cluster, node: NodeMachine) -> bool:
    """Return whether no generation was resumed since this absent node was last heard: its state is as good as
    a survivor's.
    """
    return not node.ended and node.lost_after == c.resumed_generation


def note_joined(c: Cluster, node: NodeMachine, reason: str) -> None:
    """Note that a node is present, as a new one or back, and report it."""
    node.feed(NodeEvent.HEALTHY)
    node.heard_at = c.at
    c.dirty = True
    c.persist()
    c.emit(
        "NodeJoined",
        reason,
        node=node.name,
        devices=node.facts.devices,
        host=node.facts.host,
        incarnation=node.incarnation,
    )
    c.publish()


def fence(c: Cluster, name: str, incarnation: int, reason: str) -> None:
    """Order an incarnation to end its trainers and to return as a new one."""
    c.send_to(name, incarnation, Fence(reason=reason))
    node = c.nodes.get(name)
    if node is not None and node.incarnation == incarnation and not node.ended:
        node.ended = node.fenced = True
        c.emit("NodeFenced", reason, node=name, incarnation=incarnation)


def declare_lost(c: Cluster, node: NodeMachine, how: str, reason: str) -> None:
    """Declare a node OFFLINE. The caller decides what that means for the job."""
    node.feed(NodeEvent.OFFLINE)
    node.lost_after = c.resumed_generation
    node.prepare_sent = False
    if how == "goodbye":
        node.ended = True
    if c.profiler == node.name:
        c.profiler = None
    if node.name not in c.planned:
        c.members.discard(node.name)
    for rejected in [one for one in c.rejected if one[0] == node.name]:
        # The name is free now; the rejected node may not know that, so it is asked for a Hello.
        del c.rejected[rejected]
    c.dirty = True
    c.emit(
        "NodeLost",
        reason,
        node=node.name,
        how=how,
        detected_at=c.at,
        fault_at=note_time_of_failure(c, node, node.heard_at if how == "silence" else None),
        incarnation=node.incarnation,
        host=node.facts.host,
        log=node.facts.log,
    )


def inquire_all(c: Cluster) -> None:
    """Ask every node that should be present for a Hello."""
    nodes = c.alive()
    c.inquired = {(node.name, node.incarnation): c.at for node in nodes}
    c.send_all(nodes, RequestHello())


def inquire(c: Cluster, name: str, incarnation: int) -> None:
    """Ask for a Hello, at most once per heartbeat period: a backlog of heartbeats leads to one request."""
    asked = c.inquired.get((name, incarnation))
    if asked is None or c.at - asked >= c.timing.heartbeat_s:
        c.inquired[name, incarnation] = c.at
        c.send_to(name, incarnation, RequestHello())


def request_overdue_hello(c: Cluster, node: NodeMachine, after_s: float) -> None:
    """Ask for a Hello if the node has not reported something for ``after_s``: if that report, or the order for
    it, was lost, its Hello shows it.
    """
    key = (node.name, node.incarnation)
    if c.at - c.inquired.setdefault(key, c.at) >= after_s:
        inquire(c, *key)


def silent_nodes(c: Cluster) -> list[NodeMachine]:
    """Return the nodes that have been silent for too long while others are heard.

    If several nodes should be heard and none is, this coordinator (or the broker) is more likely cut off,
    and no node would be left to continue anyway. All nodes then have a grace period from the first message
    on, as after an outage of the broker. If they are all gone, the broker publishes their last wills.
    """
    alive = c.alive()
    newest = max((c.heard_at(node) for node in alive), default=c.at)
    newest = max(newest, c.others_heard_at)
    if len(alive) > 1 and c.at - newest > c.timing.silence_s / 2:
        c.grace_until = c.wills_unreliable_until = max(c.grace_until, c.at + c.timing.hello_grace_s)
    if c.at < c.grace_until:
        return []
    limit = c.at - c.timing.silence_s
    return [node for node in alive if c.heard_at(node) < limit]


def prepare(c: Cluster, nodes: Iterable[NodeMachine]) -> None:
    """Order nodes to build the job; the one that was chosen for it also measures the model.

    The job's policy names the memory that plans assume, also if it is that of the measured device: a node
    with less refuses to build the job.
    """
    job = c.job
    if job is None:
        return
    if job.policy.device_memory_bytes is None and c.profiled is not None:
        memory_bytes = c.profiled.profile.device_memory_bytes
        job = replace(job, policy=replace(job.policy, device_memory_bytes=memory_bytes))
    measuring: list[NodeMachine] = []
    others: list[NodeMachine] = []
    for node in nodes:
        (measuring if node.name == c.profiler else others).append(node)
    c.send_all(measuring, Prepare(job=job, profile=True))
    c.send_all(others, Prepare(job=job, profile=False))


def mark_unhealthy(c: Cluster, node: NodeMachine) -> None:
    """Mark a node UNHEALTHY, since it has lost trainers."""
    node.feed(NodeEvent.UNHEALTHY)
    node.trainers_lost = True
    node.prepared = False
    node.prepare_sent = False
    if c.profiler == node.name:
        c.profiler = None
    if node.name not in c.planned:
        c.members.discard(node.name)
    c.dirty = True


def mark_healthy(c: Cluster, node: NodeMachine) -> None:
    """Note that every trainer of the node has built the job."""
    was = node.state
    node.feed(NodeEvent.HEALTHY)
    node.prepare_sent = node.trainers_lost = False
    node.prepared = True
    node.build_error = None
    c.dirty = True
    if was is NodeState.UNHEALTHY:
        c.emit("NodeRecovered", f"the trainers of {node.name} are back", node=node.name)


# --- removal --------------------------------------------------------------------------------------

MIN_LISTED_OFFLINE = 100
"""Nodes that stay listed at least, so that people can see what became of them."""


def remove_absent(c: Cluster) -> None:
    """Remove nodes that have been OFFLINE for long and that the job does not need; called at every tick."""
    offline = [node for node in c.nodes.values() if not node.alive]
    if not offline:
        return
    offline.sort(key=lambda node: node.heard_at)
    over = len(offline) - max(MIN_LISTED_OFFLINE, len(c.nodes) - len(offline))
    late = c.at - c.timing.remove_offline_s
    due = [
        node
        for number, node in enumerate(offline)
        if (number < over and node.quarantine is None) or node.heard_at <= late
    ]
    needed = needed_nodes(c) if due else frozenset()
    removed = [node for node in due if node.name not in needed]
    if not removed:
        return
    for node in removed:
        _remove(c, node)
    c.persist()
    c.publish()


def remove_unknown(c: Cluster, name: str) -> None:
    """Delete what the broker still retains of a node that is not known."""
    c.out.append(RemoveNode(cause=c.cause, node=name))


def _remove(c: Cluster, node: NodeMachine) -> None:
    del c.nodes[node.name]
    for asked in [key for key in c.inquired if key[0] == node.name]:
        del c.inquired[asked]
    remove_unknown(c, node.name)
    c.emit(
        "NodeRemoved",
        f"{node.name} at {node.facts.host} was not heard from for {c.at - node.heard_at:.0f} s, "
        "and nothing needs it",
        node=node.name,
        incarnation=node.incarnation,
    )


def needed_nodes(c: Cluster) -> frozenset[str]:
    """Return the nodes that the current job names: in its plan, generation, snapshots, checkpoint or recovery.

    Nodes that may return with state that counts are included while that may be needed.
    """
    if not c.active:
        return frozenset()
    names: set[str] = set()
    state, resumption, newest = c.state, c.resumption, c.snapshots.newest
    if isinstance(state, Planning | TrainingGroup | Paused):
        names |= {*state.members, *state.sources}
    if isinstance(state, Quiescing | Planning | Paused):
        names |= state.expected.keys()
    if resumption is not None:
        names |= {*resumption.plan.nodes, *resumption.replica_peers, *resumption.replica_peers.values()}
    if c.recovery is not None:
        names |= set(c.recovery.nodes)
    if newest is not None:
        names |= {*newest.owners, *newest.replica_peers.values()}
    if (writing := c.checkpoints.writing) is not None:
        names |= {*writing.record.owners, *writing.shares}
    if not isinstance(state, Running) or c.recovery is not None:
        names |= {node.name for node in c.nodes.values() if _has_state(c, node)}
    return frozenset(names)


def _has_state(c: Cluster, node: NodeMachine) -> bool:
    """Return whether the node took part in the last resumed decision and would be admitted again with the
    state that it holds.
    """
    counted = node.counted_in == node.lost_after == c.resumed_generation > 0
    return counted and node.prepared and not node.ended
