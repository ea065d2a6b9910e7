"""A node's share of a persistent checkpoint: one order at a time, its answer said until the next one.

The daemon writes while its trainers train, or die: the bytes are those of a kept snapshot in its memory.
"""

from statemachine.agent.events import PersistEnded
from statemachine.agent.state import Agent
from statemachine.effects import PersistLayers, StopPersisting
from statemachine.messages.cluster import CancelPersist, Persist, PersistFailed


def persist(a: Agent, command: Persist) -> None:
    """Begin, or answer again; the order before is over when another one comes."""
    if a.job is None or command.job_id != a.job.job_id:
        a.ignore("a Persist of another job")
        return
    if command.attempt == a.cancelled_attempt:
        a.send(_failed(command, "it was given up before it came"))
        return
    if a.persist_order is not None and a.persist_order.attempt == command.attempt:
        send_answer(a)
        return
    abandon(a)
    a.persist_order = command
    a.out.append(PersistLayers(cause=a.cause, order=command))


def cancel(a: Agent, command: CancelPersist) -> None:
    if a.persist_order is None or a.persist_order.attempt != command.attempt:
        a.cancelled_attempt = command.attempt  # It may be on its way: there is no order between the two.
        a.ignore("a CancelPersist of another attempt")
        return
    # The order itself stays known: a late duplicate of it would begin again.
    stop(a)
    if a.persist_answer is None:
        a.persist_answer = _failed(a.persist_order, "it was given up")


def stop(a: Agent) -> None:
    """Write no more of what is being written."""
    if a.persist_order is not None and a.persist_answer is None:
        a.out.append(StopPersisting(cause=a.cause, attempt=a.persist_order.attempt))


def abandon(a: Agent) -> None:
    """The job or this incarnation is over, or another order came."""
    stop(a)
    a.persist_order = a.persist_answer = None


def send_answer(a: Agent) -> None:
    if a.persist_answer is not None:
        a.send(a.persist_answer)


def take_answer(a: Agent, event: PersistEnded) -> None:
    """The daemon is done with an order; late news of an older one mean nothing."""
    order = a.persist_order
    if order is not None and order.attempt == event.answer.attempt and a.persist_answer is None:
        a.persist_answer = event.answer
        send_answer(a)


def _failed(order: Persist, detail: str) -> PersistFailed:
    return PersistFailed(job_id=order.job_id, attempt=order.attempt, step=order.record.step, detail=detail)
