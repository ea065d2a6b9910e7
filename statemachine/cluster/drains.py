"""Drains: nodes that are to leave the plan, and the planner's answer before anything is promised.

A request is answered once it is known whether the other nodes have a plan without the node:

* while a group trains, the planner is asked (``CheckDrain``) for the state that devices have under the
  current plan, and nothing is interrupted;
* while a generation is being made, its plan is requested without the nodes that are to leave first, and
  that plan is the answer;
* while the job is paused there is no plan with the node, and so there is none without it;
* a node that no plan needs is released at once.

A node with a plan without it is *departing* (``NodeMachine.departing``): the next generation begins at a
step boundary and leaves it out. A drain that has no such plan is refused and changes nothing, unless the
request says that it waits, or the node leaves by itself (SIGTERM). A node whose drain waits takes part like
any other, and the planner is asked again when other nodes can take part or another layout is in use. The
wait ends with the job at the latest.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from planner.reasons import join_names
from planner.values import PipelinePlacement, Situation
from statemachine.cluster.membership import needed_nodes
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Ended, Paused, Planning, Running, TrainingGroup, Waiting
from statemachine.cluster.rules import of_nodes, owned_layers
from statemachine.cluster.sharding import parts_by_device
from statemachine.cluster.state import DRAIN, Cluster
from statemachine.effects import CheckDrain
from statemachine.events import DrainChecked, DrainRequested
from statemachine.messages.cluster import Leaving, Release

REQUESTED = "drain requested"
"""Reason of a drain that a user requested."""
ANSWER_LIMIT_S = 20.0
"""Time after which a request is refused whose answer is not known, because a recovery takes long. Clients wait
for longer.
"""

_TIME_IS_OVER = "it leaves by itself when its time is over"
Outcome = Literal["leaving", "waiting", "released", "cancelled"]


# --- requests -------------------------------------------------------------------------------------


def take_request(c: Cluster, event: DrainRequested) -> None:
    """Handle a user's request to drain a node, or to cancel its drain."""
    node = c.nodes.get(event.node)
    if node is None:
        known = ", ".join(sorted(c.nodes)) or "none"
        c.answer(event.request, False, f"there is no node {event.node!r}; nodes: {known}")
    elif event.cancel:
        _take_cancellation(c, node, event.request)
    elif not node.alive:
        problem = f"{node.name} is offline and trains nothing; when it returns, it takes part again"
        c.answer(event.request, False, problem)
    elif node.released:
        _accept(c, event.request, "released", f"{node.name} is released already")
    elif node.departing:
        _accept(c, event.request, "leaving", _leaves(node))
    else:
        c.drains.requests.setdefault(node.name, []).append(event)
        if event.when_possible and node.draining is None:
            _set_draining(c, node, REQUESTED)
        if DRAIN not in c.due:
            c.set_timer(DRAIN, ANSWER_LIMIT_S)
        c.dirty = True


def take_leaving(c: Cluster, node: NodeMachine, signal: Leaving) -> None:
    """Record that a node leaves by itself: its drain waits if it has to, until the node's time is over."""
    node.leaving = True
    if node.draining is None or node.draining == REQUESTED:
        _set_draining(c, node, signal.reason)
    if node.released:
        c.send(node, Release())


def _set_draining(c: Cluster, node: NodeMachine, reason: str) -> None:
    node.draining = reason
    c.dirty = True
    c.persist()
    c.publish()


def _take_cancellation(c: Cluster, node: NodeMachine, request: str) -> None:
    name = node.name
    if node.released:
        problem = f"{name} is released already; restart its daemon, and it takes part again"
    elif node.leaving:
        problem = f"{name} leaves by itself ({node.draining}), which only its host can prevent"
    elif node.draining is None and name not in c.drains.requests:
        problem = f"no drain of {name} is under way"
    elif _is_left_out(c, node):
        problem = f"{name} is leaving already, with generation {c.generation}; restart its daemon afterwards"
    else:
        _close_requests(c, name, f"another request cancelled the drain of {name}")
        node.draining, node.drain_granted, node.drain_waits = None, False, ""
        c.drains.impossible.pop(name, None)
        c.dirty = True
        c.persist()
        c.emit("NodeDrainCancelled", f"{name} stays: a user cancelled its drain", node=name)
        c.publish()
        _accept(c, request, "cancelled", f"the drain of {name} is cancelled, and it takes part as before")
        return
    c.answer(request, False, problem)


def _is_left_out(c: Cluster, node: NodeMachine) -> bool:
    """Return whether the current generation, or the plan that is being made for it, does without the node."""
    state = c.state
    if isinstance(state, Planning):
        return node.name in state.left_out
    return isinstance(state, TrainingGroup) and node.departing and node.name not in state.needed


def requests_overdue(c: Cluster) -> None:
    """Answer the requests for which a recovery has not shown in time whether a plan can do without the node. A
    drain that may wait is kept.
    """
    unknown = "a recovery is under way, and until it ends nobody knows whether a plan can do without"
    for name in list(c.drains.requests):
        _let_requests_wait(c, name, f"{name} waits to leave: {unknown} it")
        _close_requests(c, name, f"{name} is not drained, and nothing has changed: {unknown} it; try again")


# --- answers --------------------------------------------------------------------------------------


def _accept(c: Cluster, request: str, outcome: Outcome, detail: str) -> None:
    c.answer(request, True, detail, outcome=outcome)


def _close_requests(c: Cluster, name: str, detail: str, outcome: Outcome | None = None) -> None:
    """Answer all requests about a node; without an outcome they are refused."""
    for event in c.drains.requests.pop(name, ()):
        c.answer(event.request, outcome is not None, detail, outcome=outcome or "")
    if not c.drains.requests:
        c.cancel_timer(DRAIN)


def _let_requests_wait(c: Cluster, name: str, detail: str) -> None:
    """Accept the requests about a node that may wait until there is a plan without it."""
    requests = c.drains.requests.pop(name, [])
    for event in requests:
        if event.when_possible:
            _accept(c, event.request, "waiting", detail)
    c.drains.requests[name] = [event for event in requests if not event.when_possible]


def _leaves(node: NodeMachine) -> str:
    return f"{node.name} leaves at the next step boundary: the other nodes have a plan without it"


def _grant(c: Cluster, names: Iterable[str]) -> None:
    """Let nodes leave, since there is a plan without all of them."""
    granted = [c.nodes[name] for name in names]
    together = [node.name for node in granted] if len(granted) > 1 else []
    for node in granted:
        if node.draining is None:
            node.draining = REQUESTED
        node.drain_granted, node.drain_waits = True, ""
        c.emit("NodeDraining", f"{_leaves(node)} ({node.draining})", node=node.name, nodes=together)
        _close_requests(c, node.name, _leaves(node), "leaving")
    c.dirty = True
    c.persist()
    c.publish()


def _deny(c: Cluster, node: NodeMachine, reason: str) -> None:
    """Keep a node, since there is no plan without it: refuse its drain, or let it wait."""
    name = node.name
    why = f"the plan cannot do without {name}: {reason}"
    if node.draining is not None:
        _let_wait(c, node, reason)
    wait = f"{name} stays and waits; it leaves as soon as a plan without it exists. Now {why}"
    _let_requests_wait(c, name, wait)
    remedy = "add a node and drain it again, or let it wait for one: ftd drain --when-possible"
    detail = f"{name} is not drained, and nothing has changed: {why}; {remedy} {name}"
    if c.drains.requests[name]:
        c.emit("NodeDrainRefused", detail, node=name)
    _close_requests(c, name, detail)


def _let_wait(c: Cluster, node: NodeMachine, reason: str) -> None:
    """Record that a node has to stay although it is to leave; say so when it begins to wait."""
    begins = node.drain_granted or not node.drain_waits
    if not begins and node.drain_waits == reason:
        return
    node.drain_granted, node.drain_waits = False, reason
    if begins:
        until = _TIME_IS_OVER if node.leaving else "its drain waits"
        why = f"{node.name} stays for now, and {until}: the plan cannot do without it: {reason}"
        c.emit("NodeDrainWaiting", why, node=node.name)
    c.dirty = True
    c.persist()
    c.publish()


def drain_waits(node: NodeMachine) -> str:
    """Return why a node that is to leave has to stay for now, and what ends that; empty if it does not wait."""
    ends = f"; {_TIME_IS_OVER}" if node.drain_waits and node.leaving else ""
    return node.drain_waits + ends


def describe_released(c: Cluster) -> str:
    """Return which nodes are there and take no part because they were drained, and what takes them back; empty if
    there is none.
    """
    names = [node.name for node in c.alive() if node.released]
    if not names:
        return ""
    are, its, they = (
        ("is", "its daemon", "it takes") if len(names) == 1 else ("are", "their daemons", "they take")
    )
    return f"{join_names(sorted(names))} {are} drained; restart {its}, and {they} part again"


# --- release --------------------------------------------------------------------------------------


def settle(c: Cluster) -> None:
    """Release the nodes that are to leave and that no plan needs, and answer requests that need no planner."""
    for name in [name for name in c.drains.requests if name not in c.nodes or not c.nodes[name].alive]:
        _close_requests(c, name, f"{name} was lost before it could be released")
    leaving = leavers(c)
    if not leaving:
        return
    match c.state:
        case Waiting() | Ended():
            _release_unneeded(c, leaving, ())
        case Running() as group if c.recovery is None or c.recovery.committed_at is not None:
            # A node outside the running plan holds nothing once a step of this generation committed.
            if c.progress.published_step >= c.progress.known_step:  # It may alone know the missing votes.
                _release_unneeded(c, leaving, group.needed)
        case Paused() as paused:
            needed = needed_nodes(c)
            for node in leaving:
                if not node.ready and node.name not in needed:
                    _release(c, node)
                elif node.name in c.drains.requests or not node.drain_waits:
                    _deny(c, node, f"the job is paused: {paused.reason}")


def leavers(c: Cluster) -> list[NodeMachine]:
    """Return the nodes that are to leave, whether or not a plan can do without them, and are not released."""
    asked = c.drains.requests
    return [
        node for node in c.alive() if (node.draining is not None or node.name in asked) and not node.released
    ]


def _release_unneeded(c: Cluster, leaving: Iterable[NodeMachine], needed: Collection[str]) -> None:
    for node in leaving:
        if node.name not in needed:
            _release(c, node)


def _release(c: Cluster, node: NodeMachine) -> None:
    """Let a node go that holds nothing the job needs."""
    if node.draining is None:
        node.draining = REQUESTED
    node.drain_granted, node.drain_waits, node.released = True, "", True
    node.prepare_sent = node.prepared = False
    if c.profiler == node.name:
        c.profiler, c.dirty = None, True  # Another one is to measure the job.
    c.members.discard(node.name)
    c.send(node, Release())
    c.persist()
    if not c.active:
        why = "no job is under way"
    elif isinstance(c.state, Waiting):
        why = "the job has not begun"
    else:
        why = "it holds nothing that the job needs"
    c.emit("NodeReleased", f"{node.name} is released ({node.draining}): {why}", node=node.name)
    _close_requests(c, node.name, f"{node.name} is released: {why}", "released")
    c.publish()


# --- asking the planner while a group trains ------------------------------------------------------


def ask_planner(c: Cluster, group: Running, leaving: Iterable[NodeMachine]) -> None:
    """Ask whether there is a plan without the nodes that are to leave: without all of them, or, if there is
    none, without one after another, in the order of their names.

    The answer stays the same for this layout unless further nodes can take part, so it is not asked again.
    """
    drains = c.drains
    candidates = [node for node in leaving if not node.departing and node.name in group.needed]
    if not candidates or not c.templates_ready:
        return
    if drains.checking is not None and drains.checking.generation == c.generation:
        return
    _renew(c, group.resumption.plan.pipelines)
    for node in candidates:
        reason = drains.impossible.get(node.name)
        if reason is not None and (node.name in drains.requests or node.drain_waits != reason):
            _deny(c, node, reason)
    pending = [node.name for node in candidates if node.name not in drains.impossible]
    if not pending:
        return
    names = tuple(pending[:1] if drains.one_by_one else pending)
    drains.checking = CheckDrain(
        cause=c.cause, generation=c.generation, nodes=names, situation=_situation(c, group, frozenset(names))
    )
    c.out.append(drains.checking)


def _renew(c: Cluster, pipelines: tuple[PipelinePlacement, ...]) -> None:
    """Forget earlier answers if they were for another layout, or if further nodes can take part."""
    drains, usable = c.drains, _usable(c)
    if drains.pipelines != pipelines or not usable <= drains.usable:
        drains.impossible.clear()
        drains.one_by_one, drains.usable, drains.pipelines = False, usable, pipelines


def _usable(c: Cluster) -> frozenset[str]:
    """Return the nodes that would take part in a generation that begins now."""
    return frozenset(node.name for node in c.alive() if node.ready and not node.departing)


def _situation(c: Cluster, group: Running, leaving: frozenset[str]) -> Situation:
    """Return the situation at the next step boundary, without these nodes and those that leave already."""
    nodes = _usable(c) - leaving
    resumption, zero1 = group.resumption, c.current_job.policy.zero1
    parts = None
    if zero1 or resumption.held_parts:
        replicas = "aor" in resumption.protection
        parts = {
            device: tuple(sorted(part for part in held if replicas or not part.replica))
            for device, held in of_nodes(parts_by_device(resumption.plan, zero1=zero1), nodes).items()
        }
    return Situation(
        nodes=tuple(sorted(nodes)),
        holdings=of_nodes(owned_layers(resumption.plan), nodes),
        previous=resumption.plan,
        speeds=c.speeds,
        horizon_s=c.horizon_s(len(nodes)),
        parts=parts,
    )


def take_check(c: Cluster, event: DrainChecked) -> None:
    """Let the nodes leave, or find out which of them can."""
    drains, asked = c.drains, c.drains.checking
    if asked is None or (asked.generation, asked.nodes) != (event.generation, event.nodes):
        c.ignore("an answer about a drain that was not asked for")
        return
    drains.checking, c.dirty = None, True
    if event.generation != c.generation or not isinstance(c.state, Running):
        return
    # One of them may be lost by now, or its drain cancelled: the plan without all of them says nothing then.
    wanted = [node.name for node in leavers(c) if node.name in event.nodes]
    if len(wanted) < len(event.nodes):
        return
    if event.problem is None:
        _grant(c, wanted)
    elif len(wanted) > 1:
        drains.one_by_one = True
    else:
        departing = sorted(node.name for node in c.alive() if node.departing and not node.released)
        also = f" while {join_names(departing)} leaves" if departing else ""
        drains.impossible[wanted[0]] = f"{event.problem}{also}"
        _deny(c, c.nodes[wanted[0]], f"{event.problem}{also}")


# --- the plan of a generation ---------------------------------------------------------------------


def next_left_out(c: Cluster, state: Planning, reason: str) -> frozenset[str]:
    """Return the nodes to request a plan without when there is none without ``state.left_out``: those that the
    planner said it can do without, and then nobody.

    :param reason: why there is no plan, which is kept for the nodes that have to stay.
    """
    state.drain_problems[state.left_out] = reason
    departing = frozenset(name for name in state.left_out if c.nodes[name].departing)
    return departing if departing < state.left_out else frozenset()


def settle_plan(c: Cluster, state: Planning, pipelines: tuple[PipelinePlacement, ...]) -> None:
    """Let the nodes leave that the plan of a generation does without, and keep those that there is no plan
    without.
    """
    granted = [name for name in sorted(state.left_out) if not c.nodes[name].departing]
    if granted:
        _grant(c, granted)
    previous = c.resumption.plan if c.resumption is not None else None
    if state.drain_problems:
        reason = list(state.drain_problems.values())[-1]
        for name in sorted(state.members - state.left_out):
            if c.nodes[name].departing:
                _let_wait(c, c.nodes[name], reason)
    if previous is None:
        return
    if previous.pipelines == pipelines:
        # Nothing moves, so the same holds under this plan. Otherwise others may have what only they had.
        _renew(c, pipelines)
        for names, problem in state.drain_problems.items():
            if len(names) == 1:
                c.drains.impossible.update(dict.fromkeys(names, problem))
            else:
                c.drains.one_by_one = True
    concerned = state.recovery.nodes
    left = sorted(state.left_out.intersection(previous.nodes))
    concerned.extend(name for name in left if name not in concerned)
