"""Checks of what we publish against the models that the contract is made of.

A mismatch is a bug of ours. It is logged, and the message is published nevertheless: a subscriber can live
with an unexpected field, but not without the report of a failure.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from ftd.transport.wire.catalogue import EVENTS
from ftd.transport.wire.public import EventMessage, encode_json
from ftd.transport.wire.states import ClusterState

_log = structlog.get_logger("ftd.transport.wire")

_DETAILS: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()
}
_STATE = msgspec.json.Decoder(ClusterState)


def _log_mismatch(problem: str) -> None:
    _log.error("contract_broken", problem=problem, remedy="this is a bug in ftd: please report it")


on_mismatch: Callable[[str], None] = _log_mismatch
"""Callback for a problem; the tests replace it with a function that raises."""


def problem_of_details(event: str, details: bytes) -> str | None:
    """Return what is wrong with ``details`` (JSON) of an event of this name, in a sentence; None: nothing."""
    decoder = _DETAILS.get(event)
    if decoder is None:
        return f"the event {event} is not in ftd.transport.wire.catalogue"
    try:
        decoder.decode(details)
    except msgspec.DecodeError as error:
        return f"details of {event}: {error}; the model is in ftd.transport.wire.catalogue"
    return None


def encode_event(message: EventMessage) -> bytes:
    """Encode an event for publishing; a mismatch with its model is a bug, and is logged."""
    problem = problem_of_details(message.event, encode_json(message.details))
    if problem is not None:
        on_mismatch(problem)
    return encode_json(message)


def encode_state(state: dict[str, Any]) -> bytes:
    """Encode the cluster's state for publishing; a mismatch with its model is a bug, and is logged."""
    payload = encode_json(state)
    try:
        _STATE.decode(payload)
    except msgspec.DecodeError as error:
        on_mismatch(f"the cluster's state: {error}; the model is ftd.transport.wire.states.ClusterState")
    return payload
