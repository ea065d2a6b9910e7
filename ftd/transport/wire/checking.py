"""What we publish, held against the models that the contract is made of.

A mismatch is a bug of ours. It is logged, and published nevertheless: a subscriber that gets a field too many
can live with it, one that hears nothing of a failure cannot.
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
    _log.error("contract_broken", problem=problem, remedy="a bug of ours: please report it")


on_mismatch: Callable[[str], None] = _log_mismatch
"""What happens to a problem; the tests put an exception here."""


def problem_of_details(event: str, details: bytes) -> str | None:
    """What is wrong with ``details`` (JSON) of an event of this name, in a sentence; None: nothing."""
    decoder = _DETAILS.get(event)
    if decoder is None:
        return f"the event {event} is not in ftd.transport.wire.catalogue"
    try:
        decoder.decode(details)
    except msgspec.DecodeError as error:
        return f"details of {event}: {error}; the model is in ftd.transport.wire.catalogue"
    return None


def problem_of_state(payload: bytes) -> str | None:
    """What is wrong with a state of the cluster, in a sentence; None: nothing."""
    try:
        _STATE.decode(payload)
    except msgspec.DecodeError as error:
        return f"the cluster's state: {error}; the model is ftd.transport.wire.states.ClusterState"
    return None


def encode_event(message: EventMessage) -> bytes:
    """The event as it is published; what its model does not allow is a bug, and told."""
    problem = problem_of_details(message.event, encode_json(message.details))
    if problem is not None:
        on_mismatch(problem)
    return encode_json(message)


def encode_state(state: dict[str, Any]) -> bytes:
    """The cluster's state as it is published; what its model does not allow is a bug, and told."""
    payload = encode_json(state)
    problem = problem_of_state(payload)
    if problem is not None:
        on_mismatch(problem)
    return payload
