"""Who can take a job, and what is said of who cannot."""

import asyncio

import pytest

from ftd.errors import PeerError
from ftd.local.readiness import Readiness


def test_news_that_come_with_the_end_of_the_wait_count() -> None:
    async def scene(*, news: bool) -> None:
        ready = Readiness(devices_per_node=1)
        waiting = asyncio.create_task(ready.wait(["a"], limit_s=0.0))
        await asyncio.sleep(0)
        if news:
            ready.on_event({"event": "TrainerStarted", "node": "a", "details": {"device": 0}})
            ready.on_state({"nodes": {"a": {"state": "HEALTHY"}}})
        await waiting

    asyncio.run(scene(news=True))
    with pytest.raises(PeerError, match="a was not ready within 0 s"):
        asyncio.run(scene(news=False))
