"""Every recipe in examples/ on a real cluster: the loss goes down, and a kill loses no step."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftd.config.job import load_job_data
from tests.helpers.playground import Playground, Run

pytestmark = pytest.mark.devices(1)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FTD = [sys.executable, "-P", "-m", "ftd.cli.main"]


def ftd(*arguments: object) -> str:
    """Run a command as a user does, in the root of the project."""
    done = subprocess.run(
        [*FTD, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(
    ground: Playground, job: Path, *, steps: int, kill_at: int | None = None, override: dict[str, Any]
) -> Run:
    """Run a job file to its end; check that every step was committed once and nothing was undone."""
    run = ground.offer(load_job_data(job, steps=steps, override=override))
    if kill_at is not None:
        ground.play({"at_step": kill_at, "do": "kill", "node": "node-2"})
    ground.until_event("JobFinished")
    assert [event["step"] for event in run.named("StepCommitted")] == list(range(1, steps + 1))
    assert bool(run.named("NodeLost")) == (kill_at is not None)
    assert all(recovery["rolled_back_steps"] == 0 for recovery in run.recoveries)
    return run


def has_learned(run: Run) -> bool:
    """Return whether the mean of the last losses is below that of the first ones."""
    losses = [run.losses[step] for step in sorted(run.losses)]
    some = max(1, len(losses) // 4)
    return sum(losses[-some:]) < sum(losses[:some])


@pytest.mark.parametrize(
    ("name", "steps", "kill_at", "arguments"),
    [
        ("bert", 12, 5, {"warmup_steps": 4}),
        ("vit", 16, None, {"layers": 2}),
        ("resnet", 12, 5, {"width": 8}),
    ],
)
def test_a_training_function_learns(
    ground: Playground, name: str, steps: int, kill_at: int | None, arguments: dict[str, Any]
) -> None:
    override = {"training": {"arguments": arguments}, "evaluation": {"every_steps": steps, "batches": 1}}
    run = train(ground, EXAMPLES / f"{name}.toml", steps=steps, kill_at=kill_at, override=override)
    assert has_learned(run)


def test_a_llama_is_pretrained_exported_and_fine_tuned(ground: Playground, tmp_path: Path) -> None:
    corpus, base = tmp_path / "corpus", tmp_path / "base-model"
    sources = "runtime/sources/*.py"
    ftd("data", "train-tokenizer", sources, "--vocabulary", 512, "--out", corpus / "tokenizer")
    ftd("data", "tokenize", sources, "--tokenizer", corpus / "tokenizer", "--out", corpus / "code.bin")
    override: dict[str, Any] = {
        "model": {"overrides": {"num_hidden_layers": 2}},
        "data": {"tokens": str(corpus / "*.bin"), "tokenizer": str(corpus / "tokenizer"), "length": 64},
        "evaluation": {"every_steps": 12, "batches": 1},
        "checkpoint": {"url": str(tmp_path / "pretrain")},
    }
    assert has_learned(train(ground, EXAMPLES / "pretrain.toml", steps=12, override=override))
    ftd("checkpoint", "export", tmp_path / "pretrain", base, "--format", "huggingface")

    ground.tidy()
    text = tmp_path / "notes.txt"
    text.write_text("A node was lost, and training continues with the others.\n" * 500)
    override = {
        "model": {"huggingface": str(base)},
        "data": {"length": 64, "text": str(text)},
        "checkpoint": {"url": str(tmp_path / "lora")},
    }
    assert has_learned(train(ground, EXAMPLES / "lora.toml", steps=12, override=override))
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    ftd("checkpoint", "export", tmp_path / "lora", adapter, "--format", "huggingface")
    ftd("checkpoint", "export", tmp_path / "lora", merged, "--format", "huggingface", "--merge")

    tokens = AutoTokenizer.from_pretrained(merged)("def build():", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        model = AutoModelForCausalLM.from_pretrained(merged)
        after = model(tokens).logits
        adapted = AutoModelForCausalLM.from_pretrained(base)
        adapted.load_adapter(str(adapter))
        torch.testing.assert_close(adapted(tokens).logits, after, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-2)


def test_the_ported_script_has_the_losses_of_the_plain_one(ground: Playground, tmp_path: Path) -> None:
    """The job runs in float64, where rounding cannot hide another formula: the gradients of all steps are
    clipped.
    """
    steps = 6
    override = {
        "training": {"precision": "float64", "clip_gradient_norm": 0.5},
        "evaluation": {"every_steps": steps, "batches": 1},
        "checkpoint": {"url": str(tmp_path / "nanogpt")},
    }
    job = EXAMPLES / "nanogpt" / "train_ftd.toml"
    run = train(ground, job, steps=steps, kill_at=3, override=override)
    assert all(event["details"]["gradient_norm"] > 0.5 for event in run.named("StepCommitted"))
    expected = plain_losses(tmp_path, max_iters=steps, dtype="torch.float64", grad_clip=0.5)
    assert [run.losses[step] for step in range(1, steps + 1)] == pytest.approx(expected, rel=1e-9)


def plain_losses(directory: Path, **settings: Any) -> list[float]:
    """Run the plain script with other settings, and with the samples that ftd takes (docs/tutorials/porting.md)."""
    text = (EXAMPLES / "nanogpt" / "train_plain.py").read_text()
    for name, value in settings.items():
        text, found = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1, name
    page = (ROOT / "docs" / "tutorials" / "porting.md").read_text()
    before, after = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert text.count(before) == 1
    script = directory / "plain.py"
    script.write_text(
        f"from ftd import sample_indices\n{text.replace(before, after)}\nprint('losses', *map(repr, history))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=directory,
        env={"PYTHONPATH": f"{ROOT}:{EXAMPLES / 'nanogpt'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.splitlines()[-1].split()[1:]]


def test_the_plain_and_the_ported_script_share_their_lines() -> None:
    """Lines that the port does not have to change are the same in both scripts, word for word."""
    plain, ported = (
        (EXAMPLES / "nanogpt" / f"train_{name}.py").read_text().splitlines() for name in ("plain", "ftd")
    )
    shared = [line for line in ported if line and line.strip() in {other.strip() for other in plain}]
    assert len(shared) > len([line for line in ported if line]) // 2


def test_every_recipe_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for job in ("llama", "pretrain", "lora", "bert", "vit", "resnet", "nanogpt/train_ftd", "gpt", "mlp"):
        assert f"ftd local examples/{job}.toml --nodes 4" in listed
        assert (EXAMPLES / f"{job}.toml").is_file()
