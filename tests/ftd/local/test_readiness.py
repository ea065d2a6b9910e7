"""The readiness of nodes for a job, and the error about nodes that are not ready."""

import asyncio
from pathlib import Path

import pytest

from ftd.config.job import load_job_data
from ftd.errors import PeerError
from ftd.local.cluster import ClusterOptions, LocalCluster
from ftd.local.driver import LocalDriver
from ftd.local.run import imported_modules
from ftd.observe.run_model import RunModel

ROOT = Path(__file__).parents[3]


def driver_of(tmp_path: Path, *nodes: str) -> LocalDriver:
    driver = LocalDriver(ClusterOptions(), nodes)
    driver.cluster = LocalCluster(tmp_path, ClusterOptions())
    return driver


def make_ready(driver: LocalDriver, *nodes: str) -> None:
    for node in nodes:
        driver.run.on_event({"event": "TrainerStarted", "node": node, "details": {"device": 0}})
    driver.run.on_state({"nodes": {node: {"state": "HEALTHY"} for node in nodes}})


def test_a_message_that_arrives_with_the_timeout_counts(tmp_path: Path) -> None:
    async def wait_for_ready(*, message: bool) -> None:
        driver = driver_of(tmp_path, "a")
        if message:
            make_ready(driver, "a")
        await driver.ready(limit_s=0.0)

    asyncio.run(wait_for_ready(message=True))
    with pytest.raises(PeerError, match="a was not ready within 0 s"):
        asyncio.run(wait_for_ready(message=False))


@pytest.mark.processes
def test_nodes_whose_daemons_have_ended_are_not_waited_for(tmp_path: Path) -> None:
    async def wait() -> tuple[dict[str, str], dict[str, str]]:
        driver = driver_of(tmp_path, "a", "b", "c")
        child = await driver.cluster.processes.start("b", ["false"])
        await child.process.wait()
        waiting = asyncio.create_task(driver.await_nodes())
        first = await driver.await_nodes(stop_at_first=True)
        make_ready(driver, "a", "c")
        return first, await waiting

    first, missing = asyncio.run(wait())
    assert first == missing == {"b": "b has ended before it was ready"}


def test_nodes_that_are_late_are_named(tmp_path: Path) -> None:
    async def wait() -> dict[str, str]:
        driver = driver_of(tmp_path, "a", "b")
        make_ready(driver, "a")
        return await driver.await_nodes(0.0)

    assert asyncio.run(wait()) == {"b": "b was not ready within 0 s"}


def test_a_restarted_node_is_not_ready_before_all_its_trainers_are_up() -> None:
    run = RunModel()
    run.on_state({"nodes": {"a": {"state": "HEALTHY"}}})
    for device in (0, 1):
        assert run.list_unready_nodes(["a"], devices=2) == ["a"]
        run.on_event({"event": "TrainerStarted", "node": "a", "details": {"device": device}})
    assert run.list_unready_nodes(["a"], devices=2) == []
    run.on_daemon("a", 7)
    assert run.list_unready_nodes(["a"], devices=2) == ["a"]


def test_a_local_cluster_preloads_what_the_job_imports(tmp_path: Path) -> None:
    text = (ROOT / "examples/mlp.toml").read_text()
    for code, expected in (("from transformers import AutoModel", ("transformers",)), ("import torch", ())):
        (tmp_path / "mlp.py").write_text(f"{code}\n")
        (tmp_path / "mlp.toml").write_text(text)
        assert imported_modules(load_job_data(tmp_path / "mlp.toml")) == expected
    assert imported_modules(load_job_data(ROOT / "examples/llama.toml")) == ("transformers",)
