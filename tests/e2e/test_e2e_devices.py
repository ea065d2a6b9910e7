"""Nodes of four devices, whose stages are replicas of tensor-parallel devices: failures, and other hosts
afterwards.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftd.config.job import load_job_data
from ftd.transport.wire.public import JobData
from tests.helpers.playground import PROFILE_FILE, RELATIVE, Playground, Run, nodes_of, write_job
from tests.helpers.shared_cluster import SharedCluster

SameLosses = Callable[[Run], None]
Reference = Callable[[int], list[float]]

TABLES = """
[snapshot]
every_steps = 5
[checkpoint]
url = "{url}"
every_steps = 10
"""


@pytest.fixture
def wide(shared: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Playground]:
    """Lend a cluster of two nodes of four devices."""
    with shared.lent(request.node, nodes=2, devices_per_node=4, timing={"lost_state_s": 0.5}) as ground:
        yield ground


def by_two_job(directory: Path, url: Path, **options: object) -> JobData:
    """Return a job whose stages have four devices, and whose modules two devices can divide and four cannot."""
    tables = TABLES.format(url=url)
    path = write_job(directory, within_node="tensor", delay_s=0.01, tables=tables, **options)  # type: ignore[arg-type]
    profile = directory / PROFILE_FILE
    document = json.loads(profile.read_text()) | {"stage_devices": [4], "tensor_counts": [["heads", 2]]}
    profile.write_text(json.dumps(document | {"microbatch_rows": 4}))
    path.write_text(path.read_text().replace("microbatch = 2", "microbatch = 4"))
    return load_job_data(path)


def test_replicas_of_parts_survive_a_node_and_are_restored_on_nodes_of_two_devices(
    wide: Playground, tmp_path: Path, same_losses: SameLosses, reference: Reference
) -> None:
    job = by_two_job(tmp_path, tmp_path / "kept")
    wide.until(lambda: wide.healthy == {"node-0", "node-1"}, "both nodes are present")
    wide.submit(job)
    wide.until_step(4)
    wide.inject(do="kill", node="node-1")
    recovery = wide.until_recovery("node_lost")
    wide.further()
    wide.inject(do="start", node="node-1")
    back = wide.until_recovery("node_joined")
    for pipelines, nodes in (
        (recovery["pipelines_before"], [1, 1]),
        (recovery["pipelines_after"], [1]),
        (back["pipelines_after"], [1, 1]),
    ):
        assert nodes_of(pipelines) == nodes
        stages = [stage for pipeline in pipelines for stage in pipeline["stages"]]
        found = {(len(stage["devices"]), stage["within"], stage["replicas"]) for stage in stages}
        assert found == {(4, "tensor", 2)}
    assert (recovery["rolled_back_steps"], back["rolled_back_steps"]) == (0, 0)
    wide.until_event("CheckpointCompleted")
    wide.further()
    run = wide.stop_job()
    assert not run.named("ReplicasDiverged")
    same_losses(run)

    newest = max(event["step"] for event in run.named("CheckpointCompleted"))
    for name in ("node-0", "node-1"):
        wide.inject(do="kill", node=name)
    wide.until(lambda: not wide.healthy, "both nodes are gone")
    for name in ("narrow-0", "narrow-1"):
        wide.on_loop(wide.cluster.start_node(name, devices=2))
    wide.until(lambda: wide.healthy == {"narrow-0", "narrow-1"}, "nodes of two devices are present")
    tables = TABLES.format(url=tmp_path / "kept")
    plain = load_job_data(write_job(tmp_path, steps=newest + 6, tables=tables, arguments="split = true"))
    run = wide.submit(msgspec.structs.replace(plain, name=job.name))
    resumed = wide.until_event("JobResumed")
    assert (resumed["step"], resumed["details"]["tier"]) == (newest, "persistent")
    losses = wide.finish().losses
    expected = reference(newest + 6)[newest:]
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=RELATIVE)
