"""Replica peers: which node holds a copy of what one node alone owns.

With a single pipeline every group has one owner, and no erasure code can replace its state. The owner's
daemon sends its part of each snapshot to the next node in the order of the plan, so that every node holds
the copy of one other; idle nodes come after the last. Replica peers are chosen with the plan and stay while
its generation trains. If one is lost, or is to leave, a new generation begins, as for a planned node.
"""

from collections.abc import Collection

from planner.values import Plan
from statemachine.cluster.state import Cluster
from statemachine.messages.values import HeldSnapshot, Snapshot

BUDDY = "buddy"


def has_buddy(protection: str) -> bool:
    """Return whether replica peers hold copies of what one node alone owns."""
    return BUDDY in (part.strip() for part in protection.split("+"))


def choose_replica_peers(plan: Plan, protection: str, able: Collection[str]) -> dict[str, str]:
    """Return the replica peer of each owner; owners that are not named have none.

    :param able: nodes that are present and serve snapshots, also idle ones.
    """
    if not has_buddy(protection) or len(plan.pipelines) > 1:
        return {}
    ring = [*plan.nodes, *sorted(set(able) - set(plan.nodes))]
    owners = dict.fromkeys(stage.devices[0].node for stage in plan.pipelines[0].stages)
    chosen = {}
    for owner in owners:
        place = ring.index(owner)
        peer = next((name for name in (*ring[place + 1 :], *ring[:place]) if name in able), None)
        if peer is not None:
            chosen[owner] = peer
    return chosen


def eligible_peers(c: Cluster, members: Collection[str]) -> list[str]:
    """Return those of ``members`` that may hold copies."""
    here = [c.nodes[name] for name in sorted(members)]
    return [n.name for n in here if n.alive and not n.departing and n.facts.snapshot_port > 0]


def key_of(c: Cluster, record: Snapshot) -> HeldSnapshot:
    """Return an owner's own part of a snapshot."""
    return HeldSnapshot(job_id=c.current_job.job_id, step=record.step, generation=record.generation)


def copy_of(key: HeldSnapshot, owner: str) -> HeldSnapshot:
    """Return the copy of a snapshot that ``owner``'s replica peer holds."""
    return HeldSnapshot(job_id=key.job_id, step=key.step, generation=key.generation, owner=owner)


def same_snapshot(held: HeldSnapshot, key: HeldSnapshot) -> bool:
    """Return whether both belong to the same snapshot, whichever node's part they are."""
    return (held.job_id, held.step, held.generation) == (key.job_id, key.step, key.generation)


def held_copies(c: Cluster, record: Snapshot, *, failures: int = 0) -> dict[str, str]:
    """Return each owner whose replica peer is present and holds the copy, with that peer; see
    ``snapshots.holders``.
    """
    key = key_of(c, record)
    return {
        owner: peer
        for owner, peer in record.replica_peers.items()
        if (node := c.nodes.get(peer)) is not None
        and node.alive
        and copy_of(key, owner) in node.snapshots
        and node.part_failures[key] <= failures
    }
