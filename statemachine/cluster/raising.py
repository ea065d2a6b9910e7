"""The job's code raised: is it the code, or the node?

A node whose hardware is bad raises by itself, and the others commit the step without it. Code that is wrong
raises wherever the step is computed: on every node of the plan, or, since who comes later to it is stopped
first, on another node when it is done again. Then nothing is gained by a further try: going back to a
snapshot leads to the same step. So it is remembered which step could not be committed, also through a
rollback, until it is. The same error is the same words (the exception of the traceback).
"""

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.state import Cluster
from statemachine.cluster.words import counted
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.values import Raising


def take_raised(c: Cluster, node: NodeMachine, signal: TrainerLost) -> str | None:
    """A trainer of a group that trains raised. Returns why the job fails, if it does."""
    if c.resumption is None:
        return None
    c.raised += 1
    step, generation = c.ledger.known_step + 1, c.resumption.generation
    error = last_line(signal.detail)
    past = c.raising
    same = past is not None and past.step == step and past.error == error
    if past is None or past.step != step:
        now = Raising(step=step, generation=generation, tries=1, error=error, nodes=(node.name,))
    else:
        others = [name for name in past.nodes if name != node.name] if same else []
        tries = past.tries + (generation > past.generation)
        now = Raising(step=step, generation=generation, tries=tries, error=error, nodes=(*others, node.name))
    c.raising = now
    last = f"{error}; last: {c.last_failure}"
    planned = c.resumption.plan.nodes
    if len(now.nodes) > 1 and set(planned) <= set(now.nodes):
        return f"the job's code raised in step {step} on all {counted(len(planned), 'node')}: {last}"
    if now.tries > 1 and len(now.nodes) > 1:
        where = f"on {now.nodes[-2]}, and when it was done again on {node.name}"
        return f"the job's code raised in step {step} {where}: {last}"
    if now.tries > 1 and same and planned == (node.name,):
        return f"the job's code raised in step {step} again on {node.name}: {last}"
    times = max(now.tries, c.raised)
    if times >= c.timing.raise_limit:
        where = ", ".join(now.nodes)
        return f"the job's code raised {times} times in step {step} with no step between, on {where}: {last}"
    return None


def committed(c: Cluster) -> None:
    """A step was, that was not known to be."""
    c.raised = 0
    if c.raising is not None and c.ledger.known_step >= c.raising.step:
        c.raising = None


def last_line(detail: str) -> str:
    """The exception of a traceback, which ends it."""
    lines = detail.strip().splitlines()
    return lines[-1].strip() if lines else ""
