"""A node's share of a persistent checkpoint: one order at a time, whose answer is repeated until the next
order.

The daemon writes while its trainers train or die: the bytes are those of a retained snapshot in its memory.
"""

from statemachine.agent.events import PersistEnded
from statemachine.agent.state import Agent
from statemachine.effects import PersistLayers, StopPersisting
from statemachine.messages.cluster import CancelPersist, Persist, PersistFailed


def persist(a: Agent, command: Persist) -> None:
    """Begin to write, or repeat the answer. A new order ends the one before."""
    if a.job is None or command.job_id != a.job.job_id:
        a.ignore("a Persist of another job")
        return
    if command.attempt == a.cancelled_attempt:
        a.send(_failed(command, "it was cancelled before it arrived"))
        return
    if a.persist_order is not None and a.persist_order.attempt == command.attempt:
        send_answer(a)
        return
    abandon(a)
    a.persist_order = command
    a.out.append(PersistLayers(cause=a.cause, order=command))


def cancel(a: Agent, command: CancelPersist) -> None:
    if a.persist_order is None or a.persist_order.attempt != command.attempt:
        a.cancelled_attempt = command.attempt  # The Persist may still arrive: the two have no order.
        a.ignore("a CancelPersist of another attempt")
        return
    # The order itself is remembered, since a late duplicate of it would begin again.
    stop(a)
    if a.persist_answer is None:
        a.persist_answer = _failed(a.persist_order, "it was cancelled")


def stop(a: Agent) -> None:
    """Stop what is being written."""
    if a.persist_order is not None and a.persist_answer is None:
        a.out.append(StopPersisting(cause=a.cause, attempt=a.persist_order.attempt))


def abandon(a: Agent) -> None:
    """Abandon the order: the job or this incarnation is over, or another order came."""
    stop(a)
    a.persist_order = a.persist_answer = None


def send_answer(a: Agent) -> None:
    if a.persist_answer is not None:
        a.send(a.persist_answer)


def take_answer(a: Agent, event: PersistEnded) -> None:
    """Record the daemon's answer to the current order; late answers to older orders are ignored."""
    order = a.persist_order
    if order is not None and order.attempt == event.answer.attempt and a.persist_answer is None:
        a.persist_answer = event.answer
        send_answer(a)


def _failed(order: Persist, detail: str) -> PersistFailed:
    return PersistFailed(job_id=order.job_id, attempt=order.attempt, step=order.record.step, detail=detail)
