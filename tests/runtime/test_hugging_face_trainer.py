"""Tests that losses equal those of Hugging Face's ``Trainer``, whose gradient accumulation corresponds to
microbatches.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from runtime.data.sampling import Sampler
from runtime.deferred import DeferredModule
from statemachine.messages.trainer import TrainingData
from tests.helpers.architecture_runs import job_of, three_and_one, three_and_two, train
from tests.helpers.architectures import take_out_casts
from tests.helpers.deferred import whole
from tests.helpers.reference import load

STEPS = 8


class Recording(Trainer):
    """A ``Trainer`` that records the loss of every microbatch without rounding."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.losses: list[float] = []

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss = super().training_step(*arguments, **named)
        self.losses.append(float(loss))
        return loss


def trainer_losses(job: TrainingData, directory: Path) -> list[float]:
    """Return the loss of each step of a ``Trainer`` that gets the samples in the job's order."""
    training = load(job)
    assert isinstance(training.model, DeferredModule)
    model = whole(training.model)
    sampler = Sampler(len(training.dataset), job.global_batch, job.seed)
    order = [training.dataset[index] for step in range(1, STEPS + 1) for index in sampler.indices(step)]
    optimizer = training.optimizer(list(model.named_parameters()))
    assert training.scheduler is not None
    accumulated = job.global_batch // job.microbatch_rows
    trainer = Recording(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory),
            max_steps=STEPS,
            per_device_train_batch_size=job.microbatch_rows,
            gradient_accumulation_steps=accumulated,
            max_grad_norm=job.clip_gradient_norm or 0.0,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=order,
        optimizers=(optimizer, training.scheduler(optimizer)),
    )
    trainer.train()
    parts = trainer.losses
    return [sum(parts[i : i + accumulated]) for i in range(0, len(parts), accumulated)]


@pytest.mark.parametrize(
    ("architecture", "clip", "relative"),
    [("llama", None, 1e-9), ("vit", None, 1e-9), ("modernbert", 0.5, 1e-6)],
    ids=["next tokens", "classes", "masked tokens, clipped"],
)
def test_losses_are_those_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, clip: float | None, relative: float
) -> None:
    """Rows have unequal numbers of labels, and two pipelines share the microbatches.

    Clipped gradients differ slightly: the Trainer adds 1e-6 to their norm before it divides by it.
    """
    take_out_casts(monkeypatch.setattr)
    job = job_of(architecture, steps=STEPS, clip_gradient_norm=clip)
    with torch.random.fork_rng(devices=[]):
        expected = trainer_losses(job, tmp_path)
    assert len(expected) == STEPS
    found = train(job, three_and_two, three_and_one, leaves=1, steps=STEPS)
    assert [vote.loss for vote in found] == pytest.approx(expected, rel=relative)
