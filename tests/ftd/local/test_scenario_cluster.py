"""Jobs of a scenario's cluster that do not end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftd.config.job import load_job_data
from ftd.errors import PeerError
from ftd.faults.chaos.values import ClusterSetup, SameLosses, Scenario
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


def test_a_job_that_does_not_end_in_time_without_faults_is_an_error(tmp_path: Path) -> None:
    def begin(cluster: ScenarioCluster) -> None:
        cluster._started.set()
        cluster._state_changed.set()

    cluster, job = cluster_of(tmp_path, begin)
    scenario = Scenario(limit_s=0.05, expect=(SameLosses(relative=1e-6),))
    with pytest.raises(PeerError, match=r"did not end within limit_s = 0.05 s, 9 steps for comparison"):
        asyncio.run(cluster._baseline(scenario, job))
