"""The rights of each user at the broker, as an ACL file for mosquitto (mosquitto.conf(5), ``acl_file``).

Every user is named, and may do only what is listed. A node writes its own topics, and ``events`` and
replies, which all nodes share. Tools only read. Operators may send requests. Injecting faults is a separate
right, in addition to the node's own ``chaos = true``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftd.config.validation import require_name
from ftd.errors import ConfigurationError
from ftd.transport.wire.topics import Topics

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """User names at the broker, by purpose; a node's user has the node's name."""

    nodes: Sequence[str]
    coordinator: str = COORDINATOR
    operators: Sequence[str] = ()
    tools: Sequence[str] = ()
    chaos: Sequence[str] = ()
    """Users that may do what operators may, and inject faults."""

    def __post_init__(self) -> None:
        """Check the names.

        :raises ConfigurationError: a name is invalid, or is used twice.
        """
        seen: set[str] = set()
        for name in (self.coordinator, *self.nodes, *self.operators, *self.tools, *self.chaos):
            require_name(name, "user")
            if name in seen:
                raise ConfigurationError(
                    f"{name!r} is named twice", field="user", remedy="one user, one role"
                )
            seen.add(name)


def acl_text(cluster: str, users: Users) -> str:
    """Return the content of the file.

    :raises ConfigurationError: the cluster's name is invalid.
    """
    require_name(cluster, "cluster")
    topics = Topics(cluster=cluster)
    parts = [
        f"# Rights at the broker for the ftd cluster {cluster!r}: a user who is not listed may do nothing.\n"
    ]
    parts.append(_entry(users.coordinator, "the coordinator", _coordinator(topics)))
    parts += [_entry(name, "a node", _node(topics, name)) for name in users.nodes]
    parts += [_entry(name, "an operator", _operator(topics)) for name in users.operators]
    parts += [_entry(name, "a tool: reads", _tool(topics)) for name in users.tools]
    parts += [
        _entry(name, "an operator who may inject faults", [*_operator(topics), f"write {topics.chaos('+')}"])
        for name in users.chaos
    ]
    return "\n".join(parts)


def _coordinator(topics: Topics) -> list[str]:
    reads = (topics.node_signal(), topics.request)
    both = (topics.node_state(), topics.events, topics.cluster_state, topics.command)
    among = (topics.leader, topics.leader_heartbeat, topics.journal, topics.coordinator_peer())
    writes = (topics.node_command("+"), topics.reply("+"))
    return [
        *(f"read {topic}" for topic in reads),
        *(f"readwrite {topic}" for topic in (*both, *among)),
        *(f"write {topic}" for topic in writes),
    ]


def _node(topics: Topics, name: str) -> list[str]:
    reads = (topics.node_command(name), topics.command, topics.chaos(name), topics.trace(name))
    writes = (topics.node_signal(name), topics.events, topics.reply("+"))
    return [
        *(f"read {topic}" for topic in reads),
        f"readwrite {topics.node_state(name)}",
        f"readwrite {topics.node_echo(name)}",
        f"read {topics.cluster_state}",
        *(f"write {topic}" for topic in writes),
    ]


def _tool(topics: Topics) -> list[str]:
    return [f"read {topic}" for topic in (topics.cluster_state, topics.node_state(), topics.events)]


def _operator(topics: Topics) -> list[str]:
    writes = (topics.request, topics.trace("+"))
    return [*_tool(topics), *(f"write {topic}" for topic in writes), f"read {topics.reply('+')}"]


def _entry(user: str, role: str, rights: Iterable[str]) -> str:
    lines = "".join(f"topic {right}\n" for right in rights)
    return f"# {role}\nuser {user}\n{lines}"
