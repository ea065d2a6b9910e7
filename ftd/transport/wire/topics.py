"""Topic names under ``ftd/v2/<cluster>/``, built and parsed in one place."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """The topics of one cluster."""

    cluster: str

    @property
    def root(self) -> str:
        return f"ftd/v2/{self.cluster}"

    @property
    def cluster_state(self) -> str:
        """Retained JSON: the public state, or UNREACHABLE (the coordinator's last will)."""
        return f"{self.root}/cluster/state"

    @property
    def events(self) -> str:
        """JSON event envelopes, not retained."""
        return f"{self.root}/events"

    @property
    def request(self) -> str:
        """JSON requests of clients to the coordinator."""
        return f"{self.root}/request"

    @property
    def leader(self) -> str:
        """Retained JSON: the coordinator that leads, and its term."""
        return f"{self.root}/coordinator/leader"

    @property
    def leader_heartbeat(self) -> str:
        """JSON: heartbeat of the coordinator that leads."""
        return f"{self.root}/coordinator/heartbeat"

    @property
    def journal(self) -> str:
        """Retained msgpack: the journal of the coordinator that leads."""
        return f"{self.root}/coordinator/journal"

    def coordinator_peer(self, incarnation: int | str = "+") -> str:
        """Return the topic of retained JSON that announces a coordinator; by default the filter for all
        coordinators.
        """
        return f"{self.root}/coordinator/peer/{incarnation}"

    def node_state(self, node: str = "+") -> str:
        """Return the topic of a node's state (retained JSON; OFFLINE is its last will); by default the filter
        for all nodes.
        """
        return f"{self.root}/node/{node}/state"

    def node_signal(self, node: str = "+") -> str:
        """Return the topic of a node's signals (msgpack, ``FromNode``); by default the filter for all nodes."""
        return f"{self.root}/node/{node}/signal"

    def node_command(self, node: str) -> str:
        """Return the topic of commands to one node (msgpack, ``ToNode``)."""
        return f"{self.root}/node/{node}/command"

    @property
    def command(self) -> str:
        """msgpack: commands to several nodes, ``ToNodes``. All nodes receive them."""
        return f"{self.root}/command"

    def node_echo(self, node: str) -> str:
        """Return the topic of messages that ``ftd doctor`` sends to itself on a node's host, to check its
        rights.
        """
        return f"{self.root}/node/{node}/echo"

    def chaos(self, node: str) -> str:
        """Return the topic of chaos requests to a node (JSON)."""
        return f"{self.root}/chaos/{node}"

    def trace(self, node: str) -> str:
        """Return the topic of requests to a node for a trace of one of its trainers (JSON)."""
        return f"{self.root}/trace/{node}"

    def reply(self, client: str) -> str:
        """Return the topic of answers to one client (JSON)."""
        return f"{self.root}/reply/{client}"

    def parse_node(self, topic: str) -> tuple[str, str] | None:
        """Return the node's name in a topic of this cluster that belongs to one node, and which of its topics it
        is, such as ``signal``; else None.
        """
        match topic.removeprefix(self.root + "/").split("/"):
            case ["node", name, ("state" | "signal" | "command") as kind]:
                return name, kind
            case [("chaos" | "trace") as kind, name]:
                return name, kind
            case _:
                return None

    def node_of(self, topic: str) -> str | None:
        """Return the node's name in a topic of this cluster that belongs to one node, else None."""
        found = self.parse_node(topic)
        return None if found is None else found[0]
