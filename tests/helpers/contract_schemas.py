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
    """Raises for what is no such message."""
    components = {"components": document()["components"]}
    return fastjsonschema.compile({**components, "$ref": f"#/components/messages/{message}/payload"})


def channel_of(topic: str) -> str | None:
    """The channel whose address this topic is one of."""
    for name, channel in document()["channels"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", channel["address"])
        if re.fullmatch(pattern, topic):
            return str(name)
    return None


def problem_of(topic: str, payload: bytes) -> str | None:
    """What a subscriber who goes by the contract finds wrong with a message; None: nothing."""
    channel = channel_of(topic)
    if channel is None:
        return f"{topic} is no topic of the contract"
    if channel.startswith(("node", "leader")) and channel != "nodeState":
        return None  # Our own: no promise is made.
    if not payload:
        return None  # A retained message is taken back.
    try:
        message = msgspec.json.decode(payload)
        validator(message_of(channel, message))(message)
    except (fastjsonschema.JsonSchemaException, msgspec.DecodeError, LookupError, TypeError) as error:
        return f"{topic}: {error!r}: {payload[:400]!r}"
    return None


def message_of(channel: str, message: Json) -> str:
    """Its name in the contract.
    :raises LookupError: the channel has none of this name.
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
