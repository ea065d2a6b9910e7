"""A Hugging Face model trained on real processes, exported while it trains, and loaded by ``from_pretrained``."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.config.job import load_job_data
from runtime.checkpoint_reader import FtdCheckpointReader
from tests.helpers.llama import build
from tests.helpers.playground import Playground

pytestmark = pytest.mark.devices(1)

JOB = """
name = "llama"
steps = 24
[training]
function = "{here}/llama.py:build"
global_batch = 16
microbatch = 4
seed = 3
[tolerance]
failures = 1
[planner]
device_memory_mib = 1
[snapshot]
every_steps = 4
[checkpoint]
url = "kept"
every_steps = 8
huggingface_every_steps = 12
huggingface_directory = "exports"
"""


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(torch.arange(3, 40)[None]).logits
    assert isinstance(found, torch.Tensor)
    return found


def of_checkpoint(url: Path, step: int) -> torch.Tensor:
    """Return the logits of the model that torch reads from the checkpoint."""
    make = build().model
    assert callable(make)
    model = make()
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=FtdCheckpointReader(str(url), step=step))
    model.load_state_dict(state["model"])
    return logits(model)


def test_a_models_checkpoints_are_exported_during_training_and_by_hand(
    ground: Playground, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(here=Path(__file__).parents[1] / "helpers"))
    run = ground.submit(load_job_data(tmp_path / "job.toml"))
    ground.until_event("JobFinished")
    events = run.named("CheckpointExported")
    assert not run.named("CheckpointExportFailed") and len(events) == 2
    assert events[-1]["step"] == 24
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [
        f"step-{event['step']:012d}" for event in events
    ]
    for event in events:
        loaded = AutoModelForCausalLM.from_pretrained(event["details"]["directory"])
        assert torch.equal(logits(loaded), of_checkpoint(tmp_path / "kept", event["step"]))
    out = tmp_path / "out"
    command = ["checkpoint", "export", str(tmp_path / "kept"), str(out), "--format", "huggingface"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(out)), of_checkpoint(tmp_path / "kept", 24)
    )
