"""The content of journals as plain values."""

from typing import Any

import msgspec

from ftd.transport.wire.coordinator_messages import decompress_state
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.cluster.phases import OVER

_OUTBOX = msgspec.msgpack.Decoder(msgspec.defstruct("_Outbox", [(OUTBOX, tuple[tuple[str, str], ...], ())]))


def decode_state(stored: bytes) -> dict[str, Any]:
    """Return a durable state as plain values."""
    state: dict[str, Any] = msgspec.msgpack.decode(decompress_state(stored))
    return state


def decode_outbox(stored: bytes) -> tuple[tuple[str, str], ...]:
    """Return the events in the outbox of a durable state; the rest is skipped, which is much quicker."""
    outbox: tuple[tuple[str, str], ...] = getattr(_OUTBOX.decode(decompress_state(stored)), OUTBOX)
    return outbox


def incarnations(journal: dict[str, Any]) -> dict[str, int]:
    """Return the incarnation of each node that a decoded journal lists."""
    hosts = journal["hosts"]
    return dict(zip(hosts["name"], hosts["incarnation"], strict=True))


def is_job_over(journal: dict[str, Any]) -> bool:
    """Return whether the job of a decoded journal has ended, or there is none."""
    return journal["job"] is None or journal["phase"] in OVER


def named_nodes(journal: dict[str, Any]) -> set[str]:
    """Return the nodes that a journal names: in its plan, its generation, its snapshots, or its recovery."""
    attempt, plan, persisting = journal.get("attempt"), journal.get("plan"), journal["persisting"]
    names = {*persisting["writers"], *journal.get("resumed_replica_peers", {}).values()}
    if (recovery := journal.get("recovery")) is not None:
        names |= set(recovery["nodes"])
    if attempt is not None:
        names |= {*attempt["members"], *attempt["sources"]}
        names |= set() if attempt["resume_sent"] else set(attempt["expected"])
    for pipeline in plan["pipelines"] if plan is not None else ():
        names |= {device["node"] for stage in pipeline["stages"] for device in stage["devices"]}
    for record in (journal["snapshot"], persisting["record"]):
        for group in record["groups"] if record is not None else ():
            names |= {*group["owners"], group["replica_peer"]}
    return names
