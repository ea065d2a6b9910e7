"""When live replicas are not enough: everybody goes back to the newest snapshot that is complete everywhere.

Who holds a part of it is known from Hellos and from its completion; whether that is enough the coordinator
computes (``CheckRestore``). If it is, the decision of the generation is replaced: the snapshot's step, and
every layer is to be had on every device. What was committed behind that step is undone with the Resume, and
never before it, since until then somebody who holds it may come back. The Resume begins a new *lineage*:
reports, heartbeats and votes of another one are of a past that is no more.
"""

from dataclasses import replace

from planner.values import Device, StatePart
from statemachine.effects import CheckRestore
from statemachine.events import RestoreChecked
from statemachine.messages import RestoreFailed
from statemachine.node import NodeMachine
from statemachine.recovery import ask_plan, note_cause, pause, reconfigure
from statemachine.snapshots import holders, key_of
from statemachine.state import GIVE_UP, Attempt, Cluster
from statemachine.values import ClusterPhase, Snapshot

RESTORE_TRIES = 3
"""So often a node's part may turn out not to be had, before the node counts as one that lost it."""


def check(c: Cluster, attempt: Attempt, reason: str, lost_layers: tuple[int, ...]) -> bool:
    """Ask whether the newest snapshot can be put together. ``False``: there is none."""
    newest = c.keeping.newest
    if newest is None or not lost_layers or attempt.restoring is not None:
        return False
    attempt.why_lost = reason
    _ask(c, attempt, newest, holders(c, newest))
    return True


def _ask(c: Cluster, attempt: Attempt, newest: Snapshot, present: tuple[str, ...]) -> None:
    attempt.sources = present
    c.out.append(CheckRestore(cause=c.cause, generation=attempt.generation, record=newest, present=present))


def checked(c: Cluster, event: RestoreChecked) -> str | None:
    """Go on from the snapshot; else wait for who may help. Returns why the job is lost, if it is."""
    attempt, newest = c.attempt, c.keeping.newest
    if (
        attempt is None
        or newest is None
        or attempt.decision is None
        or c.phase is not ClusterPhase.RECOVERING
        or attempt.resume_sent
        or event.generation != attempt.generation
    ):
        c.ignore("a check of a snapshot for an older generation")
        return None
    others = holders(c, newest, failures=RESTORE_TRIES - 1)
    if not event.possible and others != attempt.sources:
        # Somebody came back meanwhile; or a node whose part could not be had before is needed after all.
        _ask(c, attempt, newest, others)
        return None
    if not event.possible:
        reason = f"{attempt.why_lost}; nor can the snapshot of step {newest.step} be restored: {event.reason}"
        return wait_or_lose(c, reason)
    attempt.restoring = event
    everything = frozenset(range(newest.groups[-1].end_layer))
    devices = [
        Device(node=n, index=d) for n in sorted(attempt.members) for d in range(c.nodes[n].facts.devices)
    ]
    holdings = dict.fromkeys(devices, everything)
    parts = tuple(StatePart(layer=layer, part=0, parts=1) for layer in sorted(everything))
    attempt.decision = replace(
        attempt.decision,
        step=newest.step,
        vote=newest.vote,
        holdings=holdings,
        ready={},
        parts=dict.fromkeys(devices, parts),
    )
    ask_plan(c, attempt, with_draining=False)
    return None


def wait_or_lose(c: Cluster, reason: str) -> str | None:
    """Nobody who is here has the state. Wait a while for who may still have it."""
    live = [
        node.name
        for _, node in sorted(c.nodes.items())
        if not node.alive and not node.gone and node.lost_after == c.resumed_generation and node.prepared
    ]
    newest = c.keeping.newest
    kept = [
        name
        for name in (newest.owners if newest is not None else ())
        if name not in live and _may_hold(c, name, newest)
    ]
    if not live and not kept:
        return reason
    waited = f"{reason}; waiting for {', '.join(live + kept)}, which may still hold it"
    pause(c, waited, needed=None)
    c.giving_up = True
    c.set_timer(GIVE_UP, c.timing.lost_state_s)
    return None


def _may_hold(c: Cluster, name: str, newest: Snapshot | None) -> bool:
    """An owner that is away, or that is just back and has yet to find what its memory holds."""
    node = c.nodes.get(name)
    return newest is not None and (node is None or not node.alive or key_of(c, newest) not in node.snapshots)


def undo(c: Cluster, attempt: Attempt) -> None:
    """With the Resume: what was committed behind the snapshot is forgotten, and done again."""
    newest, event = c.keeping.newest, attempt.restoring
    assert newest is not None, "it was checked"
    assert event is not None, "it was checked"
    ledger, before = c.ledger, c.ledger.known_step
    ledger.roll_back(newest.step, newest.vote)
    c.told_before = min(c.told_before, ledger.told)
    c.lineage = attempt.generation
    c.keeping.behind = newest.step
    for node in c.nodes.values():
        node.step = min(node.step, newest.step)
    undone = before - newest.step
    if c.recovery is not None:
        c.recovery.rolled_back_steps += undone
        c.recovery.tier = event.tier
    c.untold = {
        "reason": f"{attempt.why_lost}; back to the snapshot of step {newest.step}: {event.reason}",
        "step": newest.step,
        "generation": attempt.generation,
        "details": {
            "from_step": before,
            "to_step": newest.step,
            "undone": undone,
            "tier": event.tier,
            "sources": list(attempt.sources),
        },
    }
    tell_untold(c)


def tell_untold(c: Cluster) -> None:
    """The RolledBack of the journal: told with the step that made it, and again after a crash then."""
    if c.untold is not None:
        told = c.untold
        c.emit(
            "RolledBack", told["reason"], generation=told["generation"], step=told["step"], **told["details"]
        )


def take_restore_failed(c: Cluster, node: NodeMachine, signal: RestoreFailed) -> str | None:
    """Try again without those whose shards cannot be had. Returns why the job is lost, if it is."""
    attempt, newest = c.attempt, c.keeping.newest
    restoring = attempt is not None and attempt.resume_sent and c.phase is ClusterPhase.RECOVERING
    if attempt is None or newest is None or not restoring or signal.generation != attempt.generation:
        c.ignore("a RestoreFailed that nobody waits for", node.name)
        return None
    key = key_of(c, newest)
    for name in signal.bad:
        if name in c.nodes:
            c.nodes[name].spoiled[key] += 1
    c.emit("RestoreFailed", signal.detail, node=node.name, bad=list(signal.bad))
    if not signal.bad:
        c.raised += 1
        if c.raised >= c.timing.raise_limit:
            return f"{node.name} cannot restore the snapshot of step {newest.step}: {signal.detail}"
    note_cause(c, "connection_lost", [], "no_answer")
    reconfigure(c, f"{node.name} cannot restore the snapshot: {signal.detail}", "abort")
    return None
