"""Buddies: who keeps a copy of what one node alone owns (design §7).

Where there is one pipeline, every group has one owner, and no code can make up for it. Its daemon sends its
part of each snapshot to the next node in the order of the plan, so that every node keeps one other's; idle
nodes stand behind the last. Buddies are chosen with the plan and stay while its generation trains; one that
is lost, or is to leave, takes a new generation, as a planned node does.
"""

from collections.abc import Collection

from planner.values import Plan
from statemachine.cluster.state import Cluster
from statemachine.messages.values import HeldSnapshot, Snapshot

BUDDY = "buddy"


def choose_replica_peers(plan: Plan, protection: str, able: Collection[str]) -> dict[str, str]:
    """Owner → buddy; who is not named has none.

    :param able: nodes that are here and serve snapshots, idle ones too.
    """
    if BUDDY not in (part.strip() for part in protection.split("+")) or len(plan.pipelines) > 1:
        return {}
    ring = [*plan.nodes, *sorted(set(able) - set(plan.nodes))]
    owners = dict.fromkeys(stage.devices[0].node for stage in plan.pipelines[0].stages)
    chosen = {}
    for owner in owners:
        place = ring.index(owner)
        buddy = next((name for name in (*ring[place + 1 :], *ring[:place]) if name in able), None)
        if buddy is not None:
            chosen[owner] = buddy
    return chosen


def eligible_peers(c: Cluster, members: Collection[str]) -> list[str]:
    """Those of ``members`` that may keep copies."""
    here = [c.nodes[name] for name in sorted(members)]
    return [n.name for n in here if n.alive and n.draining is None and n.facts.snapshot_port > 0]


def copy_of(key: HeldSnapshot, owner: str) -> HeldSnapshot:
    """What ``owner``'s buddy holds of a snapshot."""
    return HeldSnapshot(job_id=key.job_id, step=key.step, generation=key.generation, owner=owner)


def same_snapshot(held: HeldSnapshot, key: HeldSnapshot) -> bool:
    """Are both of one snapshot, whoever's part they are?"""
    return (held.job_id, held.step, held.generation) == (key.job_id, key.step, key.generation)


def held_copies(c: Cluster, record: Snapshot, key: HeldSnapshot, *, failures: int = 0) -> dict[str, str]:
    """Owner → buddy, where the buddy is here and holds the copy; see ``snapshots.holders``."""
    found = {}
    for owner, buddy in record.replica_peers.items():
        node = c.nodes.get(buddy)
        held = node is not None and node.alive and copy_of(key, owner) in node.snapshots
        if held and node is not None and node.part_failures[key] <= failures:
            found[owner] = buddy
    return found
