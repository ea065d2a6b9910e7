"""Who can take a job, and what is said of who cannot."""

import asyncio
from pathlib import Path

import pytest

from ftd.config.job import load_job_data
from ftd.errors import PeerError
from ftd.local.readiness import Readiness
from ftd.local.run import imported_modules

ROOT = Path(__file__).parents[2]


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


def test_a_local_cluster_loads_what_the_job_imports(tmp_path: Path) -> None:
    text = (ROOT / "examples/mlp.toml").read_text()
    for code, expected in (("from transformers import AutoModel", ("transformers",)), ("import torch", ())):
        (tmp_path / "mlp.py").write_text(f"{code}\n")
        (tmp_path / "mlp.toml").write_text(text)
        assert imported_modules(load_job_data(tmp_path / "mlp.toml")) == expected
    assert imported_modules(load_job_data(ROOT / "examples/llama.toml")) == ("transformers",)
