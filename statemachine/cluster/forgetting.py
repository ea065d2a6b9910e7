"""Nodes that are gone for good are forgotten, so that names that never come back do not pile up.

Whoever has been OFFLINE for ``forget_s`` is listed no longer; and at most as many that are OFFLINE are
listed as nodes are here (``OFFLINE_KEPT`` at least), the first to go the first to be forgotten: where pods
come under a new name each time, hours are too long. Whom the job still needs stays, however many they are.

What a record protects from is not needed behind it. ``NodeMachine.retired`` has incarnations that are over
fenced; of a name that is not known, whoever comes with state of the job is fenced (``membership.admit``), and
whoever comes without has nothing that could be stale: reports of trainers that are not fresh count for
nothing where no decision counted them (``rules.trusted``).
"""

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.state import Cluster
from statemachine.effects import ForgetNode
from statemachine.messages.values import ClusterPhase

OFFLINE_KEPT = 100
"""So many are listed at least, for who looks what became of them."""


def forget(c: Cluster) -> None:
    """At every tick."""
    offline = [node for node in c.nodes.values() if not node.alive]
    if not offline:
        return
    offline.sort(key=lambda node: node.heard_at)
    over = len(offline) - max(OFFLINE_KEPT, len(c.nodes) - len(offline))
    late = c.at - c.timing.forget_s
    due = [node for number, node in enumerate(offline) if number < over or node.heard_at <= late]
    kept = needed(c) if due else frozenset()
    gone = [node for node in due if node.name not in kept]
    if not gone:
        return
    for node in gone:
        _forget(c, node)
    c.persist()
    c.publish()


def unknown(c: Cluster, name: str) -> None:
    """The broker still says of somebody who is not known that it is gone: that, too, can go."""
    c.out.append(ForgetNode(cause=c.cause, node=name))


def _forget(c: Cluster, node: NodeMachine) -> None:
    del c.nodes[node.name]
    for asked in [key for key in c.inquired if key[0] == node.name]:
        del c.inquired[asked]
    unknown(c, node.name)
    c.emit(
        "NodeForgotten",
        f"{node.name} at {node.facts.host} was not heard of for {c.at - node.heard_at:.0f} s, "
        "and nothing waits for it",
        node=node.name,
        incarnation=node.incarnation,
    )


def needed(c: Cluster) -> frozenset[str]:
    """Whom the job under way still names: its plan, its generation, its snapshots, its checkpoint, or the
    recovery; and who may come back with state that counts, while that may be wanted."""
    if not c.active:
        return frozenset()
    names: set[str] = set()
    attempt, resumption, newest = c.attempt, c.resumption, c.keeping.newest
    if attempt is not None:
        names |= {*attempt.members, *attempt.kept, *attempt.sources}
        if not attempt.resume_sent:
            names |= attempt.expected.keys()
    if resumption is not None:
        names |= {*resumption.plan.nodes, *resumption.buddies, *resumption.buddies.values()}
    if c.recovery is not None:
        names |= set(c.recovery.nodes)
    if newest is not None:
        names |= {*newest.owners, *newest.buddies.values()}
    if (writing := c.persisting.writing) is not None:
        names |= {*writing.record.owners, *writing.shares}
    if c.phase is not ClusterPhase.RUNNING or c.recovery is not None:
        names |= {node.name for node in c.nodes.values() if _has_state(c, node)}
    return frozenset(names)


def _has_state(c: Cluster, node: NodeMachine) -> bool:
    """It took part in the last decision that was resumed, and would be let back in with what it holds."""
    counted = node.counted_in == node.lost_after == c.resumed_generation > 0
    return counted and node.prepared and not node.gone
