"""Quarantine: nodes that fail repeatedly for the same reason are set aside until they are readmitted.

A node that is set aside stays in the cluster, with its snapshots, and builds the job, but takes part in no
generation (``NodeMachine.ready``). The quarantine belongs to the name of the node: it outlasts incarnations
and jobs, and a takeover by another coordinator.

Only failures of the node count. A trainer that SIGKILL or SIGTERM ended, or that exited by itself, was ended by
somebody. An error that several nodes raise in one step, at once or when the step is redone without the first
of them, belongs to the job's code (``trainers``), and is forgotten on all of them. An error that moves among
the nodes, such as that of a file server, makes none of them stand out.

The job comes first: if the other nodes cannot train, those that are set aside are readmitted one by one,
except where their results would be wrong. Their failures still count: the next one sets them aside again if
there are more nodes by then.
"""

from collections.abc import Sequence
from typing import Any

from statemachine.cluster.membership import declare_lost, fence
from statemachine.cluster.node import USABLE, NodeMachine
from statemachine.cluster.state import Cluster
from statemachine.error_text import is_crash, same_error
from statemachine.events import ReadmitRequested
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.values import NodeFailure, NodeState, Quarantine, QuarantineCause, RepeatedError

WRONG_RESULTS: frozenset[QuarantineCause] = frozenset({"corruption", "wrong_device"})
"""Causes of a quarantine that no need of the job ends: the node would compute wrong values unnoticed."""

HEALTH_CAUSES: frozenset[QuarantineCause] = frozenset({"wrong_device", "slow_device", "slow_link"})
"""Causes that a health check finds, and that another one can disprove."""

_FAILED: dict[QuarantineCause, str] = {
    "raised": "its trainers raised an error",
    "hung": "it made no progress",
    "crashed": "its trainers crashed",
    "device": "its devices reported an error",
    "checksum": "bytes in its memory changed",
    "corruption": "its values differed from those of its replicas",
    "wrong_device": "a device computed a wrong product in its health check",
    "slow_device": "a device was slow in its health checks",
    "slow_link": "its network was slow in its health checks",
}
_DEVICE_ERRORS = ("CUDA error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "uncorrectable ECC")
"""Parts of the last line of an exception that a device or its driver caused."""
_DETAIL_CHARACTERS = 200
"""Most characters of a failure's detail that are kept."""
MAX_FAILURES = 20
"""Most failures of a node that are kept, unless more of them are necessary to set it aside."""
_STANDS_OUT = 3
"""Multiple of the other nodes' mean number of such failures from which on a node stands out."""


# --- failures that count --------------------------------------------------------------------------


def note_trainer_failure(c: Cluster, node: NodeMachine, signal: TrainerLost) -> None:
    """Count the loss of a trainer, unless the job or somebody else is its cause.

    It must follow ``trainers.take_raised``, which finds out whether several nodes raise in this step.
    """
    cause, detail = _category(signal), last_line(signal.detail)
    if cause is None:
        return
    if signal.cause == "raised" and forgive_job_errors(c, node.name):
        return
    if signal.cause != "raised":
        detail = signal.detail.strip().partition("\n")[0]
    note_failure(c, node, cause, detail)


def _category(signal: TrainerLost) -> QuarantineCause | None:
    match signal.cause:
        case "hung":
            return "hung"
        case "raised":
            device = any(mark in last_line(signal.detail) for mark in _DEVICE_ERRORS)
            return "device" if device else "raised"
        case "exited" if is_crash(signal.detail):
            return "crashed"
        case _:
            return None


def last_line(detail: str) -> str:
    """Return the exception of a traceback, which is its last line."""
    lines = detail.strip().splitlines()
    return lines[-1].strip() if lines else ""


def forgive_job_errors(c: Cluster, name: str = "") -> bool:
    """Forget the failures of nodes that raised the same error in one step, and readmit those that were set
    aside for it. Return whether anything is the job's fault.

    :param name: node that raised just now; left out: the job failed because of the error.
    """
    error = c.repeated_error
    if error is None or (name and (len(error.nodes) < 2 or name not in error.nodes)):
        return False
    for node in [c.nodes[one] for one in error.nodes if one in c.nodes]:
        node.failures = tuple(failure for failure in node.failures if not _is_of(failure, error))
        if node.quarantine is not None and _is_of(node.quarantine.evidence[-1], error):
            others = ", ".join(one for one in error.nodes if one != node.name)
            readmit_node(
                c, node, "job", f"{others} raised the same error in step {error.step}: {error.error}"
            )
    return True


def _is_of(failure: NodeFailure, error: RepeatedError) -> bool:
    same = same_error(failure.detail, error.error, kept=_DETAIL_CHARACTERS)
    return failure.step == error.step and same


def note_failure(c: Cluster, node: NodeMachine, cause: QuarantineCause, detail: str) -> bool:
    """Count a failure of a node. Return whether it was one too many, so that the node was set aside.

    The recovery is the caller's, as with ``quarantine_node``.
    """
    limits = c.hardware.quarantine
    if node.quarantine is not None or limits.failures < 1:
        return False
    failure = make_failure(c, cause, detail)
    node.failures = (*_recent(c, node), failure)[-max(MAX_FAILURES, limits.failures) :]
    c.persist()
    evidence = [one for one in node.failures if one.cause == cause]
    if len(evidence) < limits.failures or not _stands_out(c, node, cause, len(evidence)):
        return False
    times = f" {len(evidence)} times within {duration(c.at - evidence[0].at)}, the last"
    often = times if len(evidence) > 1 else ""
    return quarantine_node(c, node, cause, evidence, f"{_FAILED[cause]}{often}: {failure.detail}")


def make_failure(c: Cluster, cause: QuarantineCause, detail: str) -> NodeFailure:
    """Return a failure of this moment, as evidence."""
    return NodeFailure(
        cause=cause,
        at=c.at,
        step=c.progress.known_step + 1,
        generation=c.generation,
        detail=detail[:_DETAIL_CHARACTERS],
    )


def _recent(c: Cluster, node: NodeMachine) -> tuple[NodeFailure, ...]:
    since = c.at - c.hardware.quarantine.window_s
    return tuple(failure for failure in node.failures if failure.at >= since)


def _stands_out(c: Cluster, node: NodeMachine, cause: QuarantineCause, count: int) -> bool:
    """Return whether the other nodes fail so much more rarely that their common surroundings are not the
    reason.
    """
    others = [one for one in c.alive() if one is not node]
    total = sum(1 for one in others for failure in _recent(c, one) if failure.cause == cause)
    return count * len(others) >= _STANDS_OUT * total


# --- setting aside --------------------------------------------------------------------------------


def quarantine_node(
    c: Cluster,
    node: NodeMachine,
    cause: QuarantineCause,
    evidence: Sequence[NodeFailure],
    reason: str,
    *,
    fenced: bool = True,
) -> bool:
    """Set a node aside, and return whether it was: not if the others cannot train without it, or if too many
    nodes are set aside already. Either way an event with the evidence says so.

    A node whose trainers run is fenced and declared lost, unless ``fenced`` is false: its state does not count,
    and it returns as a new incarnation. The caller begins the recovery that this makes necessary
    (``recover_from_loss``, or a rollback).

    :param reason: sentence that says why, without the node's name.
    """
    why = _why_not(c, node, cause)
    details: dict[str, Any] = {"cause": cause, "evidence": evidence_details(c, evidence)}
    if why:
        c.emit("QuarantineSkipped", f"{node.name} stays, since {why}: {reason}", node=node.name, **details)
        return False
    node.quarantine = Quarantine(cause=cause, at=c.at, reason=reason, evidence=tuple(evidence))
    c.dirty = True
    c.persist()
    readmit = readmit_command(node)
    c.emit(
        "NodeQuarantined",
        f"{node.name} is set aside: {reason}; to readmit it: {readmit}",
        node=node.name,
        **details,
        readmit=readmit,
    )
    if fenced and node.alive and node.state is not NodeState.UNHEALTHY and c.active:
        fence(c, node.name, node.incarnation, f"it is set aside: {reason}")
        declare_lost(c, node, "quarantine", f"{node.name} is set aside")
    c.publish()
    return True


def _why_not(c: Cluster, node: NodeMachine, cause: QuarantineCause) -> str:
    """Return why this node cannot be set aside, or an empty string if it can."""
    usable = _count_usable(c, node)
    if not usable:
        return "no other node can train"
    if usable <= node.needed_by and cause not in WRONG_RESULTS:
        return "the other nodes cannot train without it"
    others = [one for one in c.alive() if one is not node]
    aside, present = sum(1 for one in others if one.quarantine is not None), len(others) + 1
    if aside >= max(1, int(c.hardware.quarantine.max_share * present)):
        return f"{aside} of {present} nodes are set aside already (quarantine.max_share)"
    return ""


def _count_usable(c: Cluster, node: NodeMachine) -> int:
    """Return the number of other nodes that may take part in plans."""
    return sum(one is not node and one.quarantine is None and not one.departing for one in c.alive())


def evidence_details(c: Cluster, failures: Sequence[NodeFailure]) -> list[dict[str, Any]]:
    """Return failures as events and the public state have them."""
    return [
        {
            "cause": failure.cause,
            "ago_s": round(c.at - failure.at, 3),
            "step": failure.step,
            "generation": failure.generation,
            "detail": failure.detail,
        }
        for failure in failures
    ]


def readmit_command(node: NodeMachine) -> str:
    """Return the command with which a user readmits a node."""
    return f"ftd readmit {node.name}"


def describe_aside(c: Cluster, *, lasting: bool = False) -> str:
    """Return which nodes take no part because they are set aside, and how they are readmitted; empty: none.

    A node that was fenced counts too: its daemon returns by itself, and stays set aside.

    :param lasting: leave out the nodes that are readmitted if the others have no plan (``readmit_needed``).
    """
    aside = [
        (node, node.quarantine.cause)
        for _, node in sorted(c.nodes.items())
        if node.quarantine is not None and (node.alive or node.fenced)
    ]
    return "; ".join(
        f"{node.name} is set aside, since {_FAILED[cause]}; to readmit it: {readmit_command(node)}"
        for node, cause in aside
        if not lasting or cause in WRONG_RESULTS or node.build_error is not None
    )


def duration(seconds: float) -> str:
    """Return a duration for people: ``41 s``, ``12 min``, ``3 h``."""
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


# --- readmitting ----------------------------------------------------------------------------------


def readmit(c: Cluster, event: ReadmitRequested) -> None:
    """Readmit a node because a user requested it."""
    node = c.nodes.get(event.node)
    aside = [one.name for one in c.nodes.values() if one.quarantine is not None]
    if node is None or node.quarantine is None:
        which = f"set aside: {', '.join(sorted(aside))}" if aside else "no node is set aside"
        known = ", ".join(sorted(c.nodes)) or "none"
        unknown = f"there is no node {event.node!r}; nodes: {known}"
        what = unknown if node is None else f"{event.node} is not set aside"
        c.answer(event.request, False, f"{what}; {which}")
        return
    if node.quarantine.cause in HEALTH_CAUSES and node.alive and node.health is not None:
        if node.health_ordered_at is not None:
            # The check under way may have begun before the device was repaired.
            node.judged_check = node.health.number + 1
        node.health_pending, node.health_ordered_at = True, None  # The next tick orders the check.
    c.answer(event.request, True, f"{node.name} is not set aside any more; {_when_it_takes_part(c, node)}")
    readmit_node(c, node, "user", "a user requested it")


def _when_it_takes_part(c: Cluster, node: NodeMachine) -> str:
    if not node.alive:
        return "it takes part again when it returns"
    if not c.active:
        return "it takes part in the next job"
    if node.build_error is not None:
        return (
            f"it takes part again when it can build the job: {node.build_error.strip().partition(chr(10))[0]}"
        )
    if node.health_pending:
        return "it takes part again if it passes another health check"
    if node.state in USABLE and node.prepared:
        return "it takes part again from the next step boundary on"
    return "it takes part again when it has built the job"


def readmit_needed(c: Cluster) -> None:
    """Readmit one node, because there is no plan without it: the one that failed least. The others follow if
    there is no plan with it either.

    A node that would compute wrong values stays set aside. Nothing is done while other nodes can still join.
    """
    alive = c.alive()
    if any(
        node.quarantine is None and (node.prepare_sent or (node.ready and node.name not in c.members))
        for node in alive
    ):
        return
    aside = [
        (len(node.quarantine.evidence), node.name)
        for node in alive
        if node.quarantine is not None
        and node.quarantine.cause not in WRONG_RESULTS
        and node.build_error is None
    ]
    if aside:
        node = c.nodes[min(aside)[1]]
        readmit_node(c, node, "need", "the other nodes cannot train without it")


def readmit_node(c: Cluster, node: NodeMachine, by: str, reason: str) -> None:
    """Let a node that was set aside take part again. Its failures still count if it is readmitted by need.

    :param by: ``user``, ``need``, ``job`` or ``health``, as ``NodeReadmitted`` has it.
    """
    assert node.quarantine is not None, "only a node that was set aside can be readmitted"
    cause, node.quarantine = node.quarantine.cause, None
    if by == "user":
        node.failures = ()
    elif by == "need":
        node.needed_by = _count_usable(c, node)
    c.dirty = True
    c.persist()
    c.emit("NodeReadmitted", f"{node.name} may take part again: {reason}", node=node.name, by=by, cause=cause)
    c.publish()
