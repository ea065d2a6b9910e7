"""What of the durable state must not even a power cut take back; and generations set aside, so that beginning
one need not wait for the disk.

A write of the journal outlives its process. What is to outlive the host's power, too, must be forced to the
disk: milliseconds, or tens of them, on the path of a recovery. So generations are reserved in quiet, many at
a time: a journal whose end a power cut took goes on behind all that the lost end may have used.
"""

from typing import Any

from statemachine.messages.values import ClusterPhase

RESERVED = 64
"""Generations at once: more than a recovery that fails again and again goes through before there is quiet."""

_MOVING = (ClusterPhase.QUIESCING, ClusterPhase.RECOVERING, ClusterPhase.RUNNING)


def durability_key(parts: dict[str, Any]) -> tuple[Any, ...]:
    """Where this differs from what was forced last, the state is forced; and where its generation is not
    reserved. The rest can be lost: nodes know the newest steps, and what nobody was told to resume is decided
    anew. But which nodes went on with which plan the journal alone can tell.

    :param parts: of ``durable.write``.
    """
    job, snapshot = parts["job"], parts["snapshot"]
    return (
        "" if parts["phase"] in _MOVING else parts["phase"],
        job and job.job_id,
        snapshot and (snapshot.generation, snapshot.step),
        parts.get("resumed_generation"),
    )


def raise_generation(durable: dict[str, Any], generation: int) -> dict[str, Any]:
    """The same, where everything up to ``generation`` may have been used by what is not known here."""
    known = durable.get("generation")
    return {**durable, "generation": max(known, generation)} if isinstance(known, int) else durable
