"""Hints for when there is no connection to the broker."""

import socket

from aiomqtt.exceptions import MqttConnectError

from ftd.transport.address import BrokerAddress


def connection_hint(error: BaseException, broker: BrokerAddress) -> str:
    """Return a hint to append to the error; empty if the error explains itself."""
    origin = error.__cause__ or error.__context__ or error
    if isinstance(error, MqttConnectError):
        known = f"the user {broker.username} with this password" if broker.username else "anonymous clients"
        return f"; does the broker accept {known}?"
    if isinstance(origin, ConnectionRefusedError):
        return "; is the broker running there, and is broker.url right?"
    if isinstance(origin, socket.gaierror):
        return "; is the name in broker.url right, and does this host's DNS know it?"
    return ""
