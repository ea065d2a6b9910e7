"""Tests that a plain PyTorch loop resumes from a checkpoint, with ftd and without, with the losses of the job."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from typer.testing import CliRunner

from ftd import load_checkpoint
from ftd.cli.main import app
from runtime.data.batches import default_collate
from runtime.description import describe
from runtime.errors import TrainingError
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates
from storage.checkpoint import CheckpointStore
from storage.description import encode_description
from tests.helpers.kept_checkpoints import about
from tests.helpers.layer_states import Trainer
from tests.helpers.runtime_support import data_for, training_of

ROOT = Path(__file__).parents[2]


def trained(url: Path, steps: int) -> Trainer:
    """Train the example's GPT for some steps, and write a checkpoint of the last one."""
    trainer = Trainer(dropout=0.0)
    for step in range(1, steps + 1):
        trainer.step(step)
    write(url, trainer.model, trainer.states, steps)
    return trainer


def write(url: Path, model: Model, states: LayerStates, step: int) -> None:
    store = CheckpointStore.at(str(url), create=True)
    draft = store.begin(step)
    store.write_description(draft, encode_description(describe(model.root_module)))
    packed = [states.pack(layer) for layer in range(model.layer_count)]
    files = [store.write_layer(draft, k, h, [p.numpy()]) for k, (h, p) in enumerate(packed)]
    store.commit(draft, files, **about())


class Plain:
    """The same training in a loop without ftd."""

    def __init__(self) -> None:
        self.trainer = Trainer(dropout=0.0)
        training = self.trainer.training
        assert training.layers is not None and training.scheduler is not None
        self.model = nn.Sequential(*training.layers).double()
        self.optimizer = training.optimizer(list(self.model.named_parameters()))
        self.scheduler = training.scheduler(self.optimizer)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)  # The loaded values must count, not the seed.

    def step(self, step: int) -> float:
        indices = self.trainer.sampler.indices(step)
        x, target = default_collate([self.trainer.training.dataset[index] for index in indices])
        assert self.trainer.training.loss is not None
        loss = self.trainer.training.loss(self.model(x), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


def directly(url: Path, plain: Plain) -> int:
    return load_checkpoint(url, plain.model, plain.optimizer, plain.scheduler)


def as_documented(url: Path, plain: Plain) -> int:
    page = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text()
    (recipe,) = re.findall(r"```python\n(import json\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(recipe, names)
    out = url.with_name("out")
    command = ["checkpoint", "export", str(url), str(out), "--format", "torch"]
    assert CliRunner().invoke(app, command).exit_code == 0
    step = names["load"](out, plain.model, plain.optimizer, plain.scheduler)
    assert isinstance(step, int)
    return step


@pytest.mark.parametrize("load", [directly, as_documented])
def test_the_losses_are_those_of_the_job(tmp_path: Path, load: Callable[[Path, Plain], int]) -> None:
    job, plain = trained(tmp_path / "kept", 3), Plain()
    assert load(tmp_path / "kept", plain) == 3
    assert plain.scheduler.get_last_lr() != Plain().scheduler.get_last_lr()
    assert [plain.step(step) for step in (4, 5, 6)] == pytest.approx(
        [job.step(step) for step in (4, 5, 6)], rel=1e-12
    )


def test_the_model_alone_is_filled(tmp_path: Path) -> None:
    job, plain = trained(tmp_path, 2), Plain()
    assert load_checkpoint(tmp_path, plain.model, step=2) == 2
    wanted = job.model.root_module.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in plain.model.state_dict().items())


def test_whatever_does_not_fit_is_named(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    plain = Plain()
    head = plain.model[3]
    head.extra, head.norm = nn.Parameter(torch.zeros(1)), nn.LayerNorm(5)
    del plain.model[1].norm_1
    with pytest.raises(TrainingError) as raised:
        load_checkpoint(tmp_path, plain.model)
    for words in (
        "3.extra is missing",
        "the model has no 1.norm_1.weight",
        "3.norm.weight is (8,), in the model (5,)",
    ):
        assert words in str(raised.value)
    plain = Plain()
    with pytest.raises(TrainingError, match="had 2 parameter groups, this one has 1"):
        load_checkpoint(tmp_path, plain.model, torch.optim.AdamW(plain.model.parameters()))
    foreign = torch.optim.AdamW([{"params": list(nn.Linear(3, 2).parameters())}, {"params": []}])
    with pytest.raises(TrainingError, match=r"a parameter of shape \(2, 3\) that is not the model's"):
        load_checkpoint(tmp_path, plain.model, foreign)


def test_a_job_without_a_schedule_has_none_to_load(tmp_path: Path) -> None:
    model = Model(training_of([nn.Linear(6, 5), nn.Linear(5, 1)]), data_for("unused.py:build"))
    write(tmp_path, model, LayerStates(model, Optimization(model)), 1)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(plain.parameters())
    with pytest.raises(TrainingError, match="no learning-rate schedule"):
        load_checkpoint(tmp_path, plain, optimizer, MultiStepLR(optimizer, [3]))
