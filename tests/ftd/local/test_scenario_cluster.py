"""Jobs of a scenario's cluster that do not begin or do not end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftd.config.job import load_job_data
from ftd.errors import PeerError
from ftd.faults.chaos.values import ClusterSetup, SameLosses, Scenario
from ftd.local import scenario_cluster
from ftd.local.driver import LocalDriver
from ftd.local.scenario_cluster import ScenarioCluster
from ftd.observe.run_model import RunModel
from ftd.transport.wire.public import JobData
from tests.helpers.playground import write_job


def cluster_of(
    tmp_path: Path, on_submit: Callable[[ScenarioCluster], None]
) -> tuple[ScenarioCluster, JobData]:
    """Return a cluster without processes, and a job of nine steps."""
    path = write_job(tmp_path, steps=9)
    cluster = ScenarioCluster(ClusterSetup(job=str(path), nodes=2), report=lambda _: None)
    run = RunModel()

    async def submit(_: JobData) -> str:
        asyncio.get_running_loop().call_later(0.01, on_submit, cluster)
        return "tiny-1"

    async def clean_up() -> None:
        pass

    class Driver(SimpleNamespace):
        @property
        def state(self) -> Any:
            return run.state

    cluster._driver = cast(LocalDriver, Driver(run=run, submit=submit))
    cluster._clean_up = clean_up  # type: ignore[method-assign]
    return cluster, load_job_data(path)


def fail(cluster: ScenarioCluster) -> None:
    state = {"phase": "FAILED", "job": {"id": "tiny-1"}, "outcome": "train.py raised ValueError"}
    cluster._driver.run.on_state(state)
    cluster._on_state(state)


def test_a_job_that_fails_before_its_first_step_is_reported_at_once(tmp_path: Path) -> None:
    cluster, job = cluster_of(tmp_path, fail)
    with pytest.raises(PeerError, match=r"the job failed before its first step: train.py raised ValueError"):
        asyncio.run(asyncio.wait_for(cluster._train(job), 10.0))


def test_a_job_that_does_not_begin_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario_cluster, "START_S", 0.05)
    cluster, job = cluster_of(
        tmp_path, lambda cluster: cluster._driver.run.on_state({"waiting_for": "more nodes"})
    )
    with pytest.raises(PeerError, match=r"did not begin within 0.05 s; it waits for more nodes"):
        asyncio.run(cluster._train(job))


def test_a_job_that_does_not_end_in_time_without_faults_is_an_error(tmp_path: Path) -> None:
    def begin(cluster: ScenarioCluster) -> None:
        cluster._started.set()
        cluster._state_changed.set()

    cluster, job = cluster_of(tmp_path, begin)
    scenario = Scenario(limit_s=0.05, expect=(SameLosses(relative=1e-6),))
    with pytest.raises(PeerError, match=r"did not end within limit_s = 0.05 s, 9 steps for comparison"):
        asyncio.run(cluster._baseline(scenario, job))
