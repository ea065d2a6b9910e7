"""Decision whether an error that the job's code raised is the code's fault or the node's.

A node whose hardware is bad raises alone, and the others commit the step without it. Wrong code raises
wherever the step is computed: on every node of the plan, or on another node when the step is redone, since
trainers that reach the error later are stopped first. Another try then gains nothing: a rollback to a
snapshot leads to the same step. So the step that could not be committed is remembered, also through a
rollback, until it is committed. Two errors are the same if the last lines of their tracebacks differ in numbers
at most: nodes compute different samples of a step, and have objects at different addresses.
"""

from planner.reasons import count_noun
from statemachine.cluster.jobs import fail
from statemachine.cluster.membership import mark_unhealthy
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.quarantine import forgive_job_errors, last_line, note_trainer_failure
from statemachine.cluster.recovery import recover_from_loss
from statemachine.cluster.recovery_times import note_time_of_failure
from statemachine.cluster.rollback import explain_foreign_state
from statemachine.cluster.state import Cluster
from statemachine.error_text import count_error, same_error
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.values import RepeatedError

_LINE_CHARACTERS = 200
"""Most characters of a failure in the reason of its event, whose details have all of it."""


def trainer_lost(c: Cluster, node: NodeMachine, signal: TrainerLost) -> None:
    """Mark a node UNHEALTHY until it is prepared again, since one of its trainers died, hung or raised."""
    if signal.generation < node.obeyed:
        c.ignore("a TrainerLost that is older than this node's last report", node.name)
        return
    if not c.active:
        c.ignore("a TrainerLost while no job is under way: its node has another one", node.name)
        return
    known = node.trainers_lost
    mark_unhealthy(c, node)
    c.publish()
    if known and (signal.cause != "unprepared" or node.build_error is not None):
        return  # The loss counts already; no plan uses a node before its trainers are back.
    node.returning = True
    if signal.cause == "unprepared":
        node.build_error = signal.detail
    error, what = error_of(signal), f"trainer {signal.device} of {node.name}: {signal.cause}"
    c.last_failure = f"{node.name}/{signal.device} {signal.cause}: {signal.detail}"
    c.emit(
        "TrainerLost",
        f"{what}{f', {error}' if error else ''}",
        node=node.name,
        device=signal.device,
        cause=signal.cause,
        fault_at=note_time_of_failure(c, node, c.at - signal.unnoticed_s if signal.unnoticed_s > 0 else None),
        error=error,
        host=node.facts.host,
        log=node.facts.log,
        detail=signal.detail,
    )
    if not node.failed_by_fault:
        c.failing[node.name] = count_error(c.failing.get(node.name), error or what)
        c.persist()
    why = explain_foreign_state(c, signal) if signal.cause == "foreign" else None
    if why is None and signal.cause in ("raised", "foreign"):
        why = take_raised(c, node, signal)
        if why is not None:
            forgive_job_errors(c)
    if why is not None:
        fail(c, why)
    else:
        note_trainer_failure(c, node, signal)
        recover_from_loss(c, node, "trainer_lost", signal.cause, what)


def error_of(signal: TrainerLost) -> str:
    """Return what people have to know of a failure in a line: the exception, which is the last line of a
    traceback; otherwise the first line, followed by the last line of the output if that ends with a traceback.
    """
    lines = [line.strip() for line in signal.detail.strip().splitlines()]
    if not lines:
        return ""
    has_traceback = any(line.startswith("Traceback") for line in lines)
    if signal.cause == "exited" and has_traceback:
        return f"{lines[0][:_LINE_CHARACTERS]}: {lines[-1][:_LINE_CHARACTERS]}"
    return lines[-1 if has_traceback else 0][:_LINE_CHARACTERS]


def take_raised(c: Cluster, node: NodeMachine, signal: TrainerLost) -> str | None:
    """Count an error of a trainer in a group that trains. Return why the job fails, if it does."""
    if c.resumption is None:
        return None
    c.raised += 1
    step, generation = c.progress.known_step + 1, c.resumption.generation
    error = last_line(signal.detail)
    past = c.repeated_error
    same = past is not None and same_error(past.error, error)
    if past is None or past.step != step:
        now = RepeatedError(step=step, generation=generation, tries=1, error=error, nodes=(node.name,))
    else:
        others = [name for name in past.nodes if name != node.name] if same else []
        tries = past.tries + (generation > past.generation)
        now = RepeatedError(
            step=step, generation=generation, tries=tries, error=error, nodes=(*others, node.name)
        )
    c.repeated_error = now
    last = f"{error}; last: {c.last_failure}"
    planned = c.resumption.plan.nodes
    if len(now.nodes) > 1 and set(planned) <= set(now.nodes):
        return f"the job's code raised in step {step} on all {count_noun(len(planned), 'node')}: {last}"
    if now.tries > 1 and len(now.nodes) > 1:
        where = f"on {now.nodes[-2]}, and when it was redone on {node.name}"
        return f"the job's code raised in step {step} {where}: {last}"
    if now.tries > 1 and same and planned == (node.name,):
        return f"the job's code raised in step {step} again on {node.name}: {last}"
    times = max(now.tries, c.raised)
    if times >= c.timing.raise_limit:
        where = ", ".join(now.nodes)
        return (
            f"the job's code raised {times} times in step {step} with no step committed in between, on {where}: "
            f"{last}"
        )
    return None
