"""Hugging Face models in real processes: a node is killed, another joins, and the losses are a plain loop's."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftd.config.job import load_job_data
from tests.helpers.architectures import ARCHITECTURES, build, take_out_casts
from tests.helpers.plain_loop import plain_loop
from tests.helpers.playground import Playground, training_data

pytestmark = pytest.mark.devices(1)

BLOCKS = 4
LAYERS = BLOCKS + 2
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": BLOCKS},
    "mixtral": {"num_hidden_layers": BLOCKS},
    "bert": {"num_hidden_layers": BLOCKS},
    "t5": {"num_layers": BLOCKS // 2},
}
"""Models that are trained here, with options that give them as many blocks."""
KILLS = [("llama", "node"), ("mixtral", "trainer"), ("bert", "trainer"), ("t5", "node")]
"""Victim of the kill for each model. A killed node takes seconds to return, because its processes import
torch.
"""
JOB = """
name = "models"
steps = 100000
[training]
function = "{here}/models.py:build"
global_batch = 8
microbatch = 2
seed = 3
precision = "float64"
clip_gradient_norm = 0.5
[training.arguments]
architecture = "{architecture}"
options = {options}
delay_s = 0.08
[planner]
profile = "profile.json"
"""


def write_profile(path: Path) -> None:
    """Write a profile whose layers are equal, on devices that hold two thirds of a model each."""
    size = 1 << 20
    layer = {
        "forward_ms": 5.0,
        "backward_ms": 10.0,
        "parameter_bytes": size,
        "gradient_bytes": size,
        "optimizer_bytes": 2 * size,
        "activation_bytes": 0,
        "output_bytes": 4096,
    }
    document = {
        "schema": "ftd-profile/1",
        "microbatch_rows": 2,
        "layers": [layer] * LAYERS,
        "device_memory_bytes": 4 * size * LAYERS * 2 // 3,
    }
    path.write_bytes(msgspec.json.encode(document))


@pytest.mark.parametrize(("architecture", "target"), KILLS)
def test_a_model_is_trained_through_a_kill_and_a_join(
    ground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, target: str
) -> None:
    write_profile(tmp_path / "profile.json")
    [(option, value)] = OPTIONS[architecture].items()
    path = tmp_path / "job.toml"
    path.write_text(
        JOB.format(
            here=Path(__file__).parents[1] / "helpers",
            architecture=architecture,
            options=f"{{ {option} = {value} }}",
        )
    )
    job = load_job_data(path)
    ground.submit(job)
    ground.further(3)
    ground.inject(do="kill", node="node-1", target=target)
    lost = ground.until_recovery(f"{target}_lost")
    if target == "node":
        ground.inject(do="start", node="node-1")
    joined = ground.until_recovery("node_joined" if target == "node" else "node_returned")
    ground.further(3)
    run = ground.stop_job()
    assert joined["nodes"] == ["node-1"] and joined["bytes_moved"] > 0
    for recovery in (lost, joined):
        assert recovery["recomputed_steps"] <= 1 and recovery["rolled_back_steps"] == 0
        for pipelines in (recovery["pipelines_before"], recovery["pipelines_after"]):
            assert pipelines and all(len(pipeline["stages"]) > 1 for pipeline in pipelines)
    steps = len(run.losses)
    assert sorted(run.losses) == list(range(1, steps + 1))
    take_out_casts(monkeypatch.setattr)
    expected = plain_loop(
        lambda: build(architecture, OPTIONS[architecture], variable=True), training_data(job), steps
    )
    found = [run.losses[step] for step in range(1, steps + 1)]
    assert found == pytest.approx([step.loss for step in expected], rel=ARCHITECTURES[architecture].relative)
