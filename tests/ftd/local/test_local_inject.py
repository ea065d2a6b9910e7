"""Faults that are injected directly into a local cluster."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftd.errors import PeerError
from ftd.faults.chaos.targets import read_layout
from ftd.faults.chaos.values import AfterTime, CentralService, Fault
from ftd.local.cluster import LocalCluster
from ftd.local.inject import LocalInjector
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
