"""Job files without a training function, in real processes: a failure changes no loss, and losses fall.

``test_docs_commands`` runs the example.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from ftd.config.job import load_job_data
from ftd.transport.wire.public import JobData
from runtime.recipe import build
from runtime.training import Training
from tests.helpers.corpus import make_tokenizer, sentence, write_lines
from tests.helpers.plain_loop import plain_loop
from tests.helpers.playground import Playground, training_data
from tests.helpers.reference import load, reference_losses
from tests.helpers.small_models import model_of

# BERT's attention applies dropout inside a fused function, whose random numbers depend on how rows are
# split.
pytestmark = pytest.mark.devices(1)

STEPS = 40
FAMILY = "hidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 6\nnum_attention_heads = 4\n"
LLAMA = f"""
name = "llama"
steps = {STEPS}

[model]
architecture = "llama"

[model.overrides]
{FAMILY}vocab_size = 64
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true

[data]
tokens = "tokens.bin"

[optimizer]
learning_rate = 1e-2

[schedule]
warmup_steps = 4

[evaluation]
every_steps = 10
fraction = 0.1

[training]
global_batch = 16
microbatch = 2
seed = 5
precision = "float64"

[planner]
device_memory_mib = 3.0
"""
BERT = f"""
name = "bert"
steps = {STEPS}

[model]
huggingface = "model"

[model.lora]
rank = 4

[data]
text = "*.jsonl"
tokenizer = "tokenizer"
length = 32
packing = false
workers = 1

[optimizer]
name = "sgd"
learning_rate = 0.05

[training]
global_batch = 16
microbatch = 4
seed = 5
precision = "float64"
"""


def llama_job(directory: Path) -> JobData:
    """Return the job of a randomly initialised llama, on tokens that each follow from the one before."""
    (np.arange(20_000) * 7 % 64).astype("<u2").tofile(directory / "tokens.bin")
    (directory / "llama.toml").write_text(LLAMA)
    return load_job_data(directory / "llama.toml")


def test_a_llama_goes_on_after_a_kill_with_the_losses_of_a_plain_loop(
    ground: Playground, tmp_path: Path
) -> None:
    job = llama_job(tmp_path)
    ground.submit(job)
    ground.until_step(8)
    ground.inject(do="kill", node="node-1")
    lost = ground.until_recovery("node_lost")
    assert any(len(pipeline["stages"]) > 1 for pipeline in lost["pipelines_before"])
    ground.inject(do="start", node="node-1")
    run = ground.finish()
    expected = [step.loss for step in plain_loop(lambda: plain(job), training_data(job), STEPS)]
    # Hugging Face computes the loss of a language model in float32, whatever the logits are.
    assert [run.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0] / 2
    evaluated = run.named("Evaluated")
    assert [event["step"] for event in evaluated] == [10, 20, 30, 40]
    assert evaluated[-1]["details"]["loss"] < evaluated[0]["details"]["loss"]


def plain(job: JobData) -> Training:
    """Return the job's training with its model created and the mean loss written out."""

    def mean_over_tokens(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        count = (batch["labels"][:, 1:] != -100).sum()
        return output.loss * count, count

    training = build(**training_data(job).arguments)
    assert callable(training.model)
    return dataclasses.replace(training, model=training.model(), loss=mean_over_tokens)


def test_adapters_of_a_bert_learn_to_fill_masks_through_a_trainer_s_death(
    ground: Playground, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    write_lines(tmp_path / "text.jsonl", [{"text": sentence(i, 4 + i % 9)} for i in range(200)])
    model_of("bert", vocab_size=320, num_hidden_layers=3).save_pretrained(tmp_path / "model")
    assert tokenizer.is_dir()
    (tmp_path / "bert.toml").write_text(BERT)
    job = load_job_data(tmp_path / "bert.toml")
    ground.submit(job)
    ground.until_step(5)
    ground.inject(do="kill", node="node-2", target="trainer")
    ground.until_recovery("trainer_lost")
    run = ground.finish()
    data = training_data(job)
    expected = reference_losses(load(data), data, STEPS)
    assert [run.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-9)
    assert sum(expected[-8:]) < sum(expected[:8])
