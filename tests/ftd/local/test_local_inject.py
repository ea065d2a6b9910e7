"""Faults that are injected directly into a local cluster, and the files of its daemons."""

import asyncio
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftd.errors import PeerError
from ftd.faults.chaos.targets import read_layout
from ftd.faults.chaos.values import AfterTime, CentralService, Fault
from ftd.local.cluster import LocalCluster, _credentials
from ftd.local.inject import LocalInjector
from ftd.transport.address import parse_broker
from ftd.transport.client import ClusterClient


def test_a_service_that_does_not_start_again_is_no_longer_absent_on_purpose() -> None:
    async def publish_event(_: Any) -> None:
        pass

    async def kill(name: str) -> None:
        assert name in injector.absent

    async def restart(_: str) -> None:
        raise PeerError("the broker ended with 1")

    cluster = SimpleNamespace(kill=kill, restart=restart, coordinators=("coordinator",))
    injector = LocalInjector(
        cast(ClusterClient, SimpleNamespace(publish_event=publish_event)),
        cast(LocalCluster, cluster),
        layout=lambda: read_layout({}),
    )
    fault = Fault(
        id="outage", trigger=AfterTime(delay_s=0.0), do="kill", target=CentralService(service="broker")
    )
    with pytest.raises(PeerError, match="ended with 1"):
        asyncio.run(injector.inject(fault))
    assert injector.absent == set()


@pytest.mark.parametrize("password", ["plain", 'a"b\\c', "päss 🙂", ""])
def test_any_credentials_of_a_broker_can_be_written_for_the_daemons(password: str) -> None:
    broker = parse_broker("mqtt://host")
    assert _credentials(broker) == ""
    given = replace(broker, username='u"ser', password=password)
    assert tomllib.loads(_credentials(given)) == {"username": 'u"ser', "password": password}
