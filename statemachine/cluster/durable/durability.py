"""Durability beyond a power cut: which changes force the journal to the disk, and generations reserved ahead.

A write of the journal outlives its process. What is to outlive a power cut must be forced to the disk,
which takes milliseconds, or tens of them, on the path of a recovery. So generations are reserved ahead of
time, many at once: a journal whose end was lost in a power cut continues after all generations that the
lost end may have used.
"""

from typing import Any

from statemachine.messages.values import ClusterPhase

RESERVED = 64
"""Generations reserved at once: more than a recovery that fails again and again uses before the next
reservation.
"""

_MOVING = (ClusterPhase.QUIESCING, ClusterPhase.RECOVERING, ClusterPhase.RUNNING)


def durability_key(parts: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of the durable state; the state is forced to the disk if the key differs from the one last
    forced, or if its generation is not reserved.

    Everything else can be lost: nodes know the newest steps, and a generation that no node was ordered to
    resume is decided again. But only the journal knows which nodes continued with which plan.

    :param parts: result of ``durable.write``.
    """
    job, snapshot = parts["job"], parts["snapshot"]
    return (
        "" if parts["phase"] in _MOVING else parts["phase"],
        job and job.job_id,
        snapshot and (snapshot.generation, snapshot.step),
        parts.get("resumed_generation"),
    )


def raise_generation(durable: dict[str, Any], generation: int) -> dict[str, Any]:
    """Return the state with its generation raised to ``generation``, up to which generations may have been
    used unknown to it.
    """
    known = durable.get("generation")
    return {**durable, "generation": max(known, generation)} if isinstance(known, int) else durable
