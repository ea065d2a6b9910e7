"""Users' requests of a snapshot now: each is answered once, when it is known whether there is a snapshot.

* A request is refused at once if no snapshot can follow: the job has not begun to train, is paused, or computes
  its last step.
* Otherwise the next snapshot that is ordered answers it: it is accepted once that snapshot is complete in the
  memory of all nodes. If the snapshot is abandoned, the next one answers it.
* After ``ANSWER_LIMIT_S`` it is answered with what is known then: a snapshot is under way, or none could begin,
  and none is tried any more.

Clients send a request again until it is answered, also to another coordinator that takes over.
"""

from typing import Literal

from statemachine.cluster.phases import Ended, Paused, Waiting
from statemachine.cluster.state import SNAPSHOT_ANSWER, Cluster
from statemachine.messages.values import Snapshot

ANSWER_LIMIT_S = 20.0
"""Time after which a request is answered whose snapshot is not complete. Clients wait for longer."""

Outcome = Literal["complete", "under way"]


def find_obstacle(c: Cluster) -> str:
    """Return why no snapshot can follow; empty if one can."""
    match c.state:
        case Waiting():
            return "the job has not begun to train"
        case Ended(outcome=outcome):
            return f"the job has ended: {outcome}"
        case Paused(reason=reason):
            return f"the job is paused: {reason}"
        case _ if c.progress.known_step + 1 >= c.current_job.steps:
            return "the job computes its last step"
        case _:
            return ""


def add(c: Cluster, request: str, done: str) -> None:
    """Let the next snapshot answer a request.

    :param done: what else the request has changed, which its answer says too.
    """
    snapshots = c.snapshots
    snapshots.requests[request] = done
    snapshots.user_requested, c.dirty = True, True
    if SNAPSHOT_ANSWER not in c.due:
        c.set_timer(SNAPSHOT_ANSWER, ANSWER_LIMIT_S)
    c.persist()


def settle(c: Cluster) -> None:
    """Refuse the requests after which no snapshot can follow, although one could when they came."""
    if c.snapshots.pending is None and (obstacle := find_obstacle(c)):
        refuse_all(c, obstacle)


def accept_completed(c: Cluster, requests: dict[str, str], record: Snapshot) -> None:
    """Accept the requests that a complete snapshot answers."""
    holders = len(record.owners)
    memory = f"the memory of {holders} nodes" if holders > 1 else f"the memory of {record.owners[0]}"
    for request, done in requests.items():
        _accept(c, request, "complete", done, f"the snapshot of step {record.step} is complete in {memory}")
    _stop_waiting(c)


def overdue(c: Cluster) -> None:
    """Answer the requests whose snapshot is not complete in time."""
    pending = c.snapshots.pending
    for request, done in _answered_by_pending(c).items():
        step = f" of step {pending.step}" if pending is not None and pending.step is not None else ""
        text = (
            f"a snapshot{step} is under way, and not complete after {ANSWER_LIMIT_S:g} s; ftd status shows it"
        )
        _accept(c, request, "under way", done, text)
    if pending is not None:
        pending.requests = {}
    if c.snapshots.requests:
        busy = "a recovery is under way" if c.recovery is not None else "its nodes are not ready for one"
        refuse_all(c, f"within {ANSWER_LIMIT_S:g} s none could be completed, because {busy}; try again")


def refuse_all(c: Cluster, obstacle: str) -> None:
    """Refuse all requests, and give up the snapshot that they wait for."""
    snapshots, pending = c.snapshots, c.snapshots.pending
    waiting = _answered_by_pending(c) | snapshots.requests
    if not waiting:
        return
    for request, done in waiting.items():
        c.answer(request, False, f"{done}{'; ' if done else ''}no snapshot is taken: {obstacle}")
    snapshots.requests = {}
    if pending is not None:
        pending.requests = {}
    snapshots.user_requested = _has_other_protection(c)
    c.persist()
    _stop_waiting(c)


def _accept(c: Cluster, request: str, outcome: Outcome, done: str, text: str) -> None:
    c.answer(request, True, f"{done}{'; ' if done else ''}{text}", outcome=outcome)


def _answered_by_pending(c: Cluster) -> dict[str, str]:
    return c.snapshots.pending.requests if c.snapshots.pending is not None else {}


def _has_other_protection(c: Cluster) -> bool:
    """Return whether the newest snapshot has another protection than the plan's, so that one is due anyway."""
    newest, resumption, job = c.snapshots.newest, c.resumption, c.job
    if newest is None or resumption is None or job is None or job.snapshot.paused:
        return False
    return newest.groups[0].protection != resumption.protection


def _stop_waiting(c: Cluster) -> None:
    if not c.snapshots.requests and not _answered_by_pending(c):
        c.cancel_timer(SNAPSHOT_ANSWER)
