"""Devices too small for the model, or for all activations: the losses stay the same."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from ftd.config.job import load_job_data
from ftd.transport.wire.public import JobData
from tests.helpers.local_commands import ftd
from tests.helpers.memory_guard import MemoryGuard, largest_private_mib
from tests.helpers.playground import HOME, RELATIVE, Json, Playground, nodes_of, training_data, write_job
from tests.helpers.reference import load, reference_losses

pytestmark = pytest.mark.devices(1)

ROWS, MICROBATCHES = 32, 8
MEMORY_KIB = 90
"""Memory of a device. The last stage of two or three has room for its activations; the first one has no room
for those of several microbatches.
"""


def ways(pipelines: list[Json]) -> list[list[str]]:
    return [[stage["recompute"] for stage in pipeline["stages"]] for pipeline in pipelines]


def profile_with_even_times(job: Path) -> Path:
    """Measure the job's profile, and write it with layers that all take equally long. The planner then gives all
    stages equally many layers, also if the machine was busy in between.
    """
    path = job.with_name("profile.json")
    done = ftd("profile", job, "--no-network", "--output", path, home=dict(os.environ))
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_bytes())
    for layer in document["layers"]:
        layer |= {"forward_ms": 10.0, "backward_ms": 0.5, "measured": []}
        for mode in ("selective", "full"):
            if layer[mode]:
                layer[mode]["recompute_ms"] = 1.0
    path.write_text(json.dumps(document))
    return path


def test_stages_that_would_not_fit_recompute_and_the_losses_are_the_same(
    ground: Playground, tmp_path: Path
) -> None:
    path = write_job(tmp_path, delay_s=0.01, arguments="width = 16")
    text = path.read_text().replace("global_batch = 16", f"global_batch = {MICROBATCHES * ROWS}")
    text = text.replace("microbatch = 2", f'microbatch = {ROWS}\nactivation_checkpointing = "auto"')
    path.write_text(text)
    planner = (
        f'[planner]\nprofile = "{profile_with_even_times(path)}"\ndevice_memory_mib = {MEMORY_KIB / 1024}\n'
    )
    path.write_text(text.replace("[planner]\n", planner))
    run = ground.submit(load_job_data(path))
    chosen = run.named("PlanChosen")[-1]["details"]["pipelines"]
    assert len(chosen) == 2
    for of_pipeline in ways(chosen):
        assert of_pipeline[0] in ("full", "selective") and of_pipeline[-1] == "none", chosen
    ground.until_step(5)
    ground.inject(do="kill", node="node-1")
    ground.until_recovery("node_lost")
    (left,) = ways(ground.state["pipelines"])
    assert len(left) == 3 and left[0] != "none" and left[-1] == "none"
    ground.further()
    losses = ground.stop_job().losses
    data = msgspec.structs.replace(
        training_data(run.job), steps=len(losses), arguments={"width": 16}, activation_checkpointing="none"
    )
    assert [losses[step] for step in sorted(losses)] == pytest.approx(
        reference_losses(load(data), data, len(losses)), rel=RELATIVE
    )


BLOCKS, WIDTH = 48, 512
BLOCK_MIB = 4 * 8 * WIDTH**2 / 2**20
"""Parameters, gradients and two moments of Adam, in float64."""
DEVICE_MIB = BLOCKS * BLOCK_MIB / 3
PLANNED_MIB = 86.0
"""Memory that is enough for ten blocks and not for eleven. The remainder is for short-lived memory: what the
optimizer computes for one weight, chunks of state in transfer, and small blocks that the allocator keeps.
"""


def write_equal_blocks(path: Path) -> None:
    """Write a profile of the wide module in which all blocks take equally long, so that plans and what they park
    do not depend on how busy this machine was when it measured them. The sizes are as they are measured.
    """
    size = 8 * WIDTH**2
    block = {
        "forward_ms": 0.3,
        "backward_ms": 0.7,
        "parameter_bytes": size,
        "gradient_bytes": size,
        "optimizer_bytes": 2 * size + 4,
        "activation_bytes": 2 * 2 * 8 * WIDTH,
        "output_bytes": 2 * 8 * WIDTH,
        "working_bytes": size + 3 * 2 * 8 * WIDTH,
        "split": [{"devices": 2, "forward_ms": 0.2, "backward_ms": 0.5, "activation_bytes": 2 * 8 * WIDTH}],
    }
    around = {key: 0 for key in block if key.endswith("_bytes")} | {"forward_ms": 0.01, "backward_ms": 0.0}
    document = {
        "schema": "ftd-profile/1",
        "microbatch_rows": 2,
        "layers": [around, *[block] * BLOCKS, around],
    }
    path.write_bytes(msgspec.json.encode(document))


def wide_job(
    directory: Path, *, width: int, device_mib: float, within: str = "replicate", profile: str = ""
) -> JobData:
    path = directory / "wide.toml"
    path.write_text(
        f"""
name = "wide"
steps = 100000
[training]
function = "{Path(__file__).parents[1]}/helpers/wide.py:build"
global_batch = 8
microbatch = 2
seed = 3
precision = "float64"
arguments = {{ blocks = {BLOCKS}, width = {width} }}
[tolerance]
failures = 0
[planner]
within_node = "{within}"
device_memory_mib = {device_mib}
{profile}
[snapshot]
every_steps = 5
protection = "buddy"
"""
    )
    return load_job_data(path)


def test_a_model_three_times_as_large_as_a_device_trains_through_a_join_and_a_kill(
    ground: Playground, tmp_path: Path
) -> None:
    """No trainer ever exceeds the device's limit plus the memory of a tiny model's trainer."""
    ground.submit(wide_job(tmp_path, width=WIDTH // 32, device_mib=1000.0))
    ground.further()
    base_mib = largest_private_mib(ground.pids.values())
    ground.stop_job()
    with MemoryGuard(ground.pids.values) as guard:
        ground.on_loop(ground.cluster.start_node("node-4"))
        ground.until(lambda: "node-4" in ground.healthy, "node-4 is there")
        run = ground.submit(wide_job(tmp_path, width=WIDTH, device_mib=PLANNED_MIB))
        assert nodes_of(ground.state["pipelines"]) == [5]
        ground.until_step(3)
        ground.on_loop(ground.cluster.start_node("node-5"))
        ground.until_planned([*HOME, "node-4", "node-5"])
        ground.further()
        ground.until_event("SnapshotCompleted", times=2)
        ground.inject(do="kill", node="node-1")
        ground.until_event("RolledBack")
        ground.until_planned(["node-0", "node-2", "node-3", "node-4", "node-5"])
        ground.further()
        losses = ground.stop_job().losses
    assert max(guard.peaks_mib.values()) - base_mib <= DEVICE_MIB, (guard.peaks_mib, base_mib)
    data = training_data(run.job)
    expected = reference_losses(load(data), data, len(losses))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=RELATIVE)


PLANNED_SHARD_MIB = 60.0
"""Memory of a device that is enough for half of twelve blocks and for gathering one; four nodes have two such
devices each.
"""
SHARD_MIB = 85.0
"""Limit of a device: what is planned, and a remainder as above."""


@pytest.mark.devices(2)
def test_shards_of_a_model_that_fills_the_devices_survive_a_join_and_a_kill(
    ground: Playground, tmp_path: Path
) -> None:
    """The model is four times as large as a device. Old and new shards of a device do not fit together, so they are
    parked when a node joins.
    """
    ground.submit(wide_job(tmp_path, width=WIDTH // 32, device_mib=1000.0, within="shard"))
    ground.further()
    base_mib = largest_private_mib(ground.pids.values())
    ground.stop_job()
    with MemoryGuard(ground.pids.values) as guard:
        write_equal_blocks(tmp_path / "blocks.json")
        run = ground.submit(
            wide_job(
                tmp_path,
                width=WIDTH,
                device_mib=PLANNED_SHARD_MIB,
                within="shard",
                profile='profile = "blocks.json"',
            )
        )
        assert nodes_of(ground.state["pipelines"]) == [4]
        ground.until_step(3)
        ground.on_loop(ground.cluster.start_node("node-4"))
        ground.until_planned([*HOME, "node-4"])
        ground.further()
        ground.until_event("SnapshotCompleted", times=2)
        ground.inject(do="kill", node="node-1")
        ground.until_event("RolledBack")
        ground.until_planned(["node-0", "node-2", "node-3", "node-4"])
        ground.further(3)
        losses = ground.stop_job().losses
    reasons = [plan["reason"] for plan in run.named("PlanChosen")]
    assert any("in host memory to have room" in reason for reason in reasons)
    assert max(guard.peaks_mib.values()) - base_mib <= SHARD_MIB, (guard.peaks_mib, base_mib)
    data = training_data(run.job)
    expected = reference_losses(load(data), data, len(losses))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=RELATIVE)
