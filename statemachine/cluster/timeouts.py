"""What the coordinator does when time has passed."""

from statemachine.cluster.acknowledgement import repeat_orders
from statemachine.cluster.forgetting import forget
from statemachine.cluster.ledger import ask, look
from statemachine.cluster.membership import fence, lose, silent
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.recovery import after_loss, note_cause, reconfigure
from statemachine.cluster.state import QUIESCE, RESUME, SUSPICION, SUSPICIOUS, TICK, Attempt, Cluster
from statemachine.messages.values import ClusterPhase


def tick(c: Cluster, late_s: float) -> None:
    """Look who is silent. ``late_s``: how late this very tick is."""
    c.set_timer(TICK, c.timing.heartbeat_s)
    if late_s > c.timing.silence_s / 2:
        # It is we who were away (a stopped process, a suspended machine): their messages are still queued.
        c.presumed_at = c.at
        return
    look(c)
    for node in silent(c):
        c.cause = f"silence:{node.name}:{node.incarnation}"
        node_lost(c, node, "silence", f"nothing heard from {node.name} for {c.timing.silence_s} s")
    repeat_orders(c)
    forget(c)
    c.dirty = c.dirty or c.recovery is not None


def node_lost(c: Cluster, node: NodeMachine, how: str, reason: str) -> None:
    """A node went OFFLINE: go on without it."""
    lose(c, node, how, reason)
    c.persist()
    c.publish()
    if c.active and c.attempt is not None and c.phase is not ClusterPhase.PAUSED and _counted_on(c, node):
        note_cause(c, "node_lost", [node.name], how)
    after_loss(c, node, reason)


def _counted_on(c: Cluster, node: NodeMachine) -> bool:
    attempt = c.attempt
    if attempt is None:
        return False
    return node.name in (c.planned if attempt.resume_sent else attempt.expected)


def quiesce_overdue(c: Cluster) -> None:
    """Some node did not answer Quiesce in time."""
    attempt = c.attempt
    if attempt is None or c.phase is not ClusterPhase.QUIESCING:
        return
    missing = [name for name in attempt.expected if name not in attempt.reports]
    if attempt.mode == "boundary":
        reconfigure(c, f"{', '.join(missing)} did not reach the step boundary in time", "abort")
        return
    _drop(c, missing, f"no answer to Quiesce of generation {attempt.generation}")


def resume_overdue(c: Cluster) -> None:
    """The group did not form in time: try again with everybody who still answers Quiesce.

    One that hangs does not, and is fenced then. A node that answers but cannot resume for the second time
    where others could is fenced itself; one at a time and the one that has least to lose, since those who
    wait for it look the same from here.
    """
    attempt = c.attempt
    if attempt is None or c.phase is not ClusterPhase.RECOVERING:
        return
    missing = [name for name in c.planned if name not in attempt.resumed]
    again = [name for name in missing if name in c.blamed] if attempt.resumed else []
    c.blamed = set(missing) if attempt.resumed else set()
    if again:
        worst = min(again, key=lambda name: (_layers_held(attempt, name), name))
        _drop(c, [worst], f"no answer to Resume of generation {attempt.generation}, again")
    else:
        late = ", ".join(missing)
        note_cause(c, "connection_lost", [], "no_answer")
        reconfigure(c, f"{late} did not resume generation {attempt.generation} in time", "abort")


def _layers_held(attempt: Attempt, name: str) -> int:
    holdings = attempt.decision.holdings if attempt.decision is not None else {}
    return sum(len(layers) for device, layers in holdings.items() if device.node == name)


def _drop(c: Cluster, names: list[str], reason: str) -> None:
    """Go on without these. Who obeyed and yet did not answer is fenced. Who was not heard at all may be cut
    off, or it is we who are; whom the order did not reach may be behind a line that loses much, but not for
    ever: they may come back with their state."""
    attempt = c.attempt
    assert attempt is not None, "somebody did not answer"
    for name in names:
        node = c.nodes[name]
        heard = node.heard_at > attempt.began_at
        if node.alive and heard and (node.obeyed >= attempt.generation or name in c.unreached):
            fence(c, name, node.incarnation, reason)
            lose(c, node, "no_answer", reason)
        elif node.alive:
            if heard:
                c.unreached.add(name)
            lose(c, node, "no_answer" if heard else "silence", reason)
    note_cause(c, "node_lost", names, "no_answer")
    reconfigure(c, f"{', '.join(names)}: {reason}", "abort")


def suspicion_overdue(c: Cluster) -> None:
    """A connection inside the group broke, and nobody was found to be the cause: form the group anew.

    Unless it goes on regardless. The step that was past its VOTE when the connection broke proves nothing,
    nor does late news of earlier ones: the group must be seen to go on twice.
    """
    if not c.connected:
        c.set_timer(SUSPICION, c.timing.silence_s + c.timing.suspicion_s)
    elif c.phase in SUSPICIOUS and c.ledger.known_step > c.suspected_at_step + 1:
        first, c.seen_going_on = not c.seen_going_on, True
        if first:
            c.suspected_at_step = c.ledger.known_step
            c.set_timer(SUSPICION, c.timing.silence_s + c.timing.suspicion_s)
    elif c.phase in SUSPICIOUS:
        note_cause(c, "connection_lost", [], "peer")
        reconfigure(c, "a connection between trainers broke, and all of them live", "abort")


def postponed(c: Cluster, name: str, late_s: float) -> bool:
    """A deadline that fires this late says that we were stopped, not that the others are slow."""
    if name not in (QUIESCE, RESUME) or late_s <= c.timing.silence_s / 2:
        return False
    c.set_timer(name, c.timing.quiesce_s)
    return True


def steps_overdue(c: Cluster) -> None:
    if c.ledger.told < c.ledger.known_step and c.ledger.known is not None:
        c.ledger.pending.setdefault(c.ledger.known.step, c.ledger.known.vote)
        ask(c)
