"""The contract for other tools: an AsyncAPI 3 document, generated from the models that check what is
published.

``ftd/transport/wire/asyncapi.json`` is the shipped document (``python -m ftd.transport.wire.contract``
writes it; a test compares the two), and ``ftd contract`` prints it. Descriptions are the models'
docstrings, payloads their JSON Schemas. The schemas allow additional fields, as readers must, since a later
version may add some.
"""

import inspect
from typing import Any, get_args

import msgspec

from ftd.config.validation import field_descriptions
from ftd.transport.wire import public
from ftd.transport.wire.catalogue import EVENTS, severity_of
from ftd.transport.wire.contract_examples import DETAILS, EXAMPLES, envelope
from ftd.transport.wire.contract_file import FILE
from ftd.transport.wire.states import ClusterState, ClusterUnreachable
from ftd.transport.wire.topics import Topics

VERSION = "2.0.0"
"""Version of the contract. The second number counts additions; the first is the version in the topics."""

Json = dict[str, Any]

_REQUESTS = get_args(public.AnyRequest)
_OUTGOING = (
    ClusterState,
    ClusterUnreachable,
    public.NodeStateMessage,
    public.EventMessage,
    public.Answer,
    public.TraceData,
)
_INCOMING = (*_REQUESTS, public.ChaosRequest, public.TraceRequest)
_REFERENCE = "#/components/schemas/{name}"


def contract() -> Json:
    """Return the document as plain data."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "ftd",
            "version": VERSION,
            "description": (
                "What a cluster publishes on MQTT, and the requests that it accepts. Readers ignore fields, events and "
                "values that they do not know. QoS is 1: an event may arrive twice, with the same id."
            ),
        },
        "defaultContentType": "application/json",
        "servers": {
            "broker": {
                "host": "{host}:{port}",
                "protocol": "mqtt",
                "description": "The cluster's broker; mqtts if it is configured.",
                "variables": {
                    "host": {"default": "localhost"},
                    "port": {"default": "1883"},
                },
            }
        },
        "channels": _channels(),
        "operations": _operations(),
        "components": {"messages": _messages(), "schemas": _schemas()},
    }


def encode_contract() -> bytes:
    """Return the document as it is shipped."""
    return public.encode_document(contract())


# --- channels and operations -----------------------------------------------------------------------


def _channels() -> Json:
    topics = Topics(cluster="{cluster}")
    return {
        "clusterState": _channel(
            topics.cluster_state, "The cluster's state.", ["ClusterState", "ClusterUnreachable"]
        ),
        "nodeState": _channel(topics.node_state("{node}"), "A node's state.", ["NodeState"]),
        "events": _channel(topics.events, "All events.", list(EVENTS)),
        "request": _channel(topics.request, "Requests to the coordinator.", [k.__name__ for k in _REQUESTS]),
        "chaos": _channel(topics.chaos("{node}"), "Faults on demand.", ["ChaosRequest"]),
        "trace": _channel(topics.trace("{node}"), "Requests for traces.", ["TraceRequest"]),
        "reply": _channel(topics.reply("{client}"), "Answers to one client.", ["Answer"]),
        "nodeSignal": _channel(topics.node_signal("{node}"), "Internal: node to coordinator.", ["Signal"]),
        "nodeCommand": _channel(topics.node_command("{node}"), "Internal: coordinator to node.", ["Command"]),
        "nodesCommand": _channel(topics.command, "Internal: coordinator to several nodes.", ["Command"]),
        "leader": _channel(topics.leader, "Internal: which coordinator leads.", ["LeaderMessage"]),
        "leaderHeartbeat": _channel(
            topics.leader_heartbeat, "Internal: the leader's heartbeat.", ["LeaderMessage"]
        ),
        "leaderJournal": _channel(
            topics.journal, "Internal: the leader's journal, for a takeover.", ["Journal"]
        ),
        "leaderPeer": _channel(
            topics.coordinator_peer("{incarnation}"), "Internal: a coordinator is there.", ["PeerMessage"]
        ),
        "nodeEcho": _channel(topics.node_echo("{node}"), "Internal: check by ftd doctor.", ["Echo"]),
    }


_PARAMETERS = {
    "cluster": "The cluster's name: broker.cluster in ftd.toml, by default ftd.",
    "node": "The node's name.",
    "incarnation": "A coordinator's incarnation: a number.",
    "client": "The value of reply in the client's request.",
}


def _channel(address: str, description: str, messages: list[str]) -> Json:
    return {
        "address": address,
        "description": description,
        "parameters": {
            name: {"description": text} for name, text in _PARAMETERS.items() if f"{{{name}}}" in address
        },
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }


def _operations() -> Json:
    retained_by_channel = {"clusterState": True, "nodeState": True, "events": False, "reply": False}
    operations = {
        f"publish_{name}": _operation("send", name, retain) for name, retain in retained_by_channel.items()
    }
    for name in ("request", "chaos", "trace"):
        operation = _operation("receive", name, False)
        operation["reply"] = {
            "address": {
                "location": "$message.payload#/reply",
                "description": "The client's id, a level of the topic.",
            },
            "channel": {"$ref": "#/channels/reply"},
        }
        operations[f"receive_{name}"] = operation
    retained = {"leader": True, "leaderJournal": True, "leaderPeer": True}
    for name in ("nodeSignal", "nodeCommand", "nodesCommand", "nodeEcho", "leaderHeartbeat", *retained):
        operations[f"internal_{name}"] = _operation("send", name, retained.get(name, False))
    return operations


def _operation(action: str, channel: str, retain: bool) -> Json:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "bindings": {"mqtt": {"qos": 1, "retain": retain, "bindingVersion": "0.2.0"}},
    }


# --- messages --------------------------------------------------------------------------------------


def _messages() -> Json:
    messages = {name: _event(name) for name in EVENTS}
    named: dict[str, type[Any]] = {kind.__name__: kind for kind in _INCOMING}
    named |= {
        "ClusterState": ClusterState,
        "ClusterUnreachable": ClusterUnreachable,
        "NodeState": public.NodeStateMessage,
        "Answer": public.Answer,
    }
    for name, kind in named.items():
        messages[name] = {
            "name": name,
            "summary": _first_line(kind),
            "payload": {"$ref": _REFERENCE.format(name=kind.__name__)},
            "examples": [{"payload": EXAMPLES[name]}],
        }
    types = dict.fromkeys(("Signal", "Command", "Journal"), "application/msgpack")
    types |= {"Echo": "application/octet-stream"}
    types |= dict.fromkeys(("LeaderMessage", "PeerMessage"), "application/json")
    for name, kind_of_content in types.items():
        messages[name] = {
            "name": name,
            "summary": "Internal to ftd; its content may change in any version.",
            "contentType": kind_of_content,
            "payload": True,
        }
    return messages


def _event(name: str) -> Json:
    kind = EVENTS[name]
    exactly = {
        "event": {"const": name},
        "severity": {"const": severity_of(name)},
        "details": {"$ref": _REFERENCE.format(name=kind.__name__)},
    }
    return {
        "name": name,
        "summary": _first_line(kind),
        "payload": {
            "allOf": [
                {"$ref": _REFERENCE.format(name="EventMessage")},
                {"type": "object", "properties": exactly, "required": list(exactly)},
            ]
        },
        "examples": [{"payload": envelope(name, DETAILS.get(name, {}))}],
    }


def _first_line(kind: type[Any]) -> str:
    return (inspect.getdoc(kind) or kind.__name__).splitlines()[0]


# --- schemas ---------------------------------------------------------------------------------------


def _schemas() -> Json:
    kinds = [*_OUTGOING, *_INCOMING, *EVENTS.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    texts = {name: text for kind in kinds for name, text in _texts_of_all(kind).items()}
    incoming = _names_below([kind.__name__ for kind in _INCOMING], schemas)
    for name, schema in schemas.items():
        if name not in incoming:
            # Readers take what they know, and what we publish is checked when it is published.
            schema.pop("additionalProperties", None)
        for field, described in schema.get("properties", {}).items():
            if text := texts.get(f"{name}.{field}"):
                _describe(described, text)
    return schemas


def _describe(schema: Json, text: str) -> None:
    if "$ref" in schema:  # A JSON Schema ignores everything next to a reference.
        schema["allOf"] = [{"$ref": schema.pop("$ref")}]
    schema["description"] = text


def _names_below(names: list[str], schemas: Json) -> set[str]:
    """Return the names of these schemas and of all that they refer to."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [
                other for other in schemas if f'"{_REFERENCE.format(name=other)}"' in _text(schemas[name])
            ]
    return found


def _text(schema: Json) -> str:
    return msgspec.json.encode(schema).decode()


def _texts_of_all(kind: type[Any]) -> dict[str, str]:
    """Return the docstring after each field, by ``Struct.field``, for a struct and all structs of its module."""
    texts: dict[str, str] = {}
    module = inspect.getmodule(kind)
    for name, other in vars(module).items():
        if isinstance(other, type) and issubclass(other, msgspec.Struct):
            texts |= {
                f"{name}.{field}": text for field, text in field_descriptions(other, shared=False).items()
            }
    return texts


if __name__ == "__main__":
    FILE.write_bytes(encode_contract())
