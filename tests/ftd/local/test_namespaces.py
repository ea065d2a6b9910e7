"""The commands that make a network of namespaces."""

import pytest

from ftd.local import namespaces
from ftd.local.namespaces import NamespaceNetwork


def test_hosts_may_have_longer_names_than_interfaces_and_that_of_the_bridge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(*arguments: str) -> str:
        ran.append(arguments)
        return ""

    monkeypatch.setattr(namespaces, "_ip", run)
    with NamespaceNetwork(["hub"]) as network:
        network.add("the-replacement-of-node-0")
        network.add("bridge")
        network.cut("the-replacement-of-node-0")
        network.heal("the-replacement-of-node-0")
    made = [arguments[4] for arguments in ran if arguments[2:4] == ("link", "add")]
    assert made == ["bridge", "port-1", "port-2", "port-3"] and max(map(len, made)) <= 15
    assert [arguments[4:] for arguments in ran if arguments[2:4] == ("link", "set")][-2:] == [
        ("port-2", "down"),
        ("port-2", "up"),
    ]
