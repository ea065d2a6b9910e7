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
    if command.attempt == a.cancelled:
        a.say(_failed(command, "it was given up before it came"))
        return
    if a.persist is not None and a.persist.attempt == command.attempt:
        say_persisted(a)
        return
    give_up(a)
    a.persist = command
    a.out.append(PersistLayers(cause=a.cause, order=command))


def cancel(a: Agent, command: CancelPersist) -> None:
    if a.persist is None or a.persist.attempt != command.attempt:
        a.cancelled = command.attempt  # It may be on its way: there is no order between the two.
        a.ignore("a CancelPersist of another attempt")
        return
    # The order itself stays known: a late duplicate of it would begin again.
    stop(a)
    if a.persisted is None:
        a.persisted = _failed(a.persist, "it was given up")


def stop(a: Agent) -> None:
    """Write no more of what is being written."""
    if a.persist is not None and a.persisted is None:
        a.out.append(StopPersisting(cause=a.cause, attempt=a.persist.attempt))


def give_up(a: Agent) -> None:
    """The job or this incarnation is over, or another order came."""
    stop(a)
    a.persist = a.persisted = None


def say_persisted(a: Agent) -> None:
    if a.persisted is not None:
        a.say(a.persisted)


def take(a: Agent, event: PersistEnded) -> None:
    """The daemon is done with an order; late news of an older one mean nothing."""
    order = a.persist
    if order is not None and order.attempt == event.answer.attempt and a.persisted is None:
        a.persisted = event.answer
        say_persisted(a)


def _failed(order: Persist, detail: str) -> PersistFailed:
    return PersistFailed(job_id=order.job_id, attempt=order.attempt, step=order.record.step, detail=detail)
