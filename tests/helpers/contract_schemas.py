"""The shipped contract as a subscriber reads it: a compiled JSON Schema for every message."""

import functools
import re
from collections.abc import Callable
from typing import Any

import fastjsonschema
import msgspec

from ftd.transport.wire.contract_file import read_shipped_contract

Json = dict[str, Any]


@functools.cache
def document() -> Json:
    return dict(msgspec.json.decode(read_shipped_contract()))


@functools.cache
def validator(message: str) -> Callable[[Any], Any]:
    """Return a function that raises for values that are no valid message of this name."""
    components = {"components": document()["components"]}
    return fastjsonschema.compile({**components, "$ref": f"#/components/messages/{message}/payload"})


def channel_of(topic: str) -> str | None:
    """Return the channel whose address matches this topic."""
    for name, channel in document()["channels"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", channel["address"])
        if re.fullmatch(pattern, topic):
            return str(name)
    return None


def problem_of(topic: str, payload: bytes) -> str | None:
    """Return how a message violates the contract, or None if it does not."""
    channel = channel_of(topic)
    if channel is None:
        return f"{topic} is no topic of the contract"
    if channel.startswith(("node", "leader")) and channel != "nodeState":
        return None  # Internal messages: the contract promises nothing.
    if not payload:
        return None  # An empty payload removes a retained message.
    try:
        message = msgspec.json.decode(payload)
        validator(message_of(channel, message))(message)
    except (fastjsonschema.JsonSchemaException, msgspec.DecodeError, LookupError, TypeError) as error:
        return f"{topic}: {error!r}: {payload[:400]!r}"
    return None


def message_of(channel: str, message: Json) -> str:
    """Return the name of a message in the contract.
    :raises LookupError: the channel has no message of this name.
    """
    match channel:
        case "events":
            name = message["event"]
        case "clusterState":
            name = "ClusterUnreachable" if message["phase"] == "UNREACHABLE" else "ClusterState"
        case "request":
            name = f"{message['do'].title()}Request"
        case _:
            [name] = document()["channels"][channel]["messages"]
    if name not in document()["channels"][channel]["messages"]:
        raise LookupError(f"the contract has no {name} on {channel}")
    return str(name)
