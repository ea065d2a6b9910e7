"""The production transport of a coordinator: sessions at the cluster's MQTT broker."""

import hashlib
from functools import partial

from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.mqtt.size_limit import SizeLimit


class MqttTransport:
    """A ``ftd.coordinator.ports.Transport`` that opens sessions at an MQTT broker."""

    def __init__(self, broker: BrokerAddress, cluster: str) -> None:
        self.session = partial(MqttSession, broker, size_limit=SizeLimit())
        self.leader_client_id = f"ftd-{cluster}-coordinator"
        # A client that connects with it ends the leader's session, so if the broker has a password, the id
        # cannot be guessed without it.
        if broker.password:
            known = hashlib.sha256(f"{cluster}\n{broker.username}\n{broker.password}".encode()).hexdigest()
            self.leader_client_id += f"-{known[:16]}"
