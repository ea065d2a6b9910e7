"""A subscriber that receives every message of a cluster and checks it against the shipped contract."""

from collections import Counter

from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.session import MqttSession
from tests.helpers.contract_schemas import channel_of, problem_of


class ContractWitness:
    """A witness for one playground; messages that the tests publish themselves are ``excused``."""

    def __init__(self, broker: BrokerAddress, cluster: str) -> None:
        self.seen: Counter[str] = Counter()
        """Number of checked messages of each channel."""
        self._heard: list[tuple[str, bytes]] = []
        self._excused: set[tuple[str, bytes]] = set()
        self.session = MqttSession(
            broker,
            client_id="contract-witness",
            subscriptions=[f"ftd/v2/{cluster}/#"],
            on_message=lambda topic, payload, _retained: self._heard.append((topic, payload)),
        )

    def excuse(self, topic: str, payload: bytes) -> None:
        self._excused.add((topic, payload))

    def problems(self) -> list[str]:
        """Return the problems of the messages received since the last call."""
        heard, self._heard = self._heard, []
        found = []
        for topic, payload in heard:
            if (topic, payload) not in self._excused:
                self.seen[channel_of(topic) or topic] += 1
                if problem := problem_of(topic, payload):
                    found.append(problem)
        return found
