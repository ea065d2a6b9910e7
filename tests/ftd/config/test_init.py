"""Tests of ``ftd init`` by options and by questions; the file that it writes is a valid job file."""

import errno
import io
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ftd.config.job import JobFile, load_job_data
from ftd.config.job_choices import (
    SIZES,
    JobChoices,
    build_tables,
    data_table,
    image_overrides,
    model_table,
)
from ftd.config.job_reference import job_tables, render_job
from tests.helpers.commands import ftd_here

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
SMALLEST = {"name": "x", "steps": 5, "model": {"architecture": "llama"}, "data": {"tokens": "a.bin"}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with a model and data of all kinds, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("model", "tokenizer", "saved", "texts", "jobs"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "tokens.bin").write_bytes(bytes(4096))
    for name in ("m.bin", "m.idx", "texts/a.txt", "caf\udce9.bin"):
        (tmp_path / name).write_text("abc")
    for name, record in (
        ("text", {"text": "a", "id": "b"}),
        ("content", {"content": "a", "id": 3}),
        ("chat", {"messages": []}),
        ("pair", {"prompt": "a", "completion": "b"}),
        ("unclear", {"title": "a", "body": "b"}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    np.savez(tmp_path / "images.npz", images=np.zeros((6, 16, 16, 3), np.uint8), labels=np.arange(6) % 3)
    return tmp_path


class Terminal(io.StringIO):
    """Standard input with the answers of a user."""

    def isatty(self) -> bool:
        return True


class Command:
    """The command ``ftd init``, run in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, said: pytest.CaptureFixture[str]) -> None:
        self.patch, self.said = patch, said

    def __call__(self, *arguments: str, answers: str | None = None) -> tuple[int, str, str]:
        self.patch.setattr(sys, "stdin", io.StringIO() if answers is None else Terminal(answers))
        return ftd_here("init", *arguments, patch=self.patch, said=self.said)


@pytest.fixture
def init(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def written(path: Path) -> dict[str, Any]:
    """Return the non-empty tables of a file after checking that it is a valid job."""
    load_job_data(path)
    return {name: value for name, value in tomllib.loads(path.read_text()).items() if value != {}}


def test_model_and_data_are_sufficient(place: Path, init: Command) -> None:
    code, out, _ = init("--model", "llama", "--data", "texts/*.txt")
    assert code == 0
    assert out == "wrote job.toml; next: ftd local job.toml --nodes 2\n"
    tables = written(place / "job.toml")
    assert tables["name"] == "job" and tables["steps"] == 1000
    assert tables["model"]["architecture"] == "llama"
    assert tables["model"]["overrides"]["hidden_size"] == 384
    assert tables["data"] == {"text": "texts/*.txt", "tokenizer": "bytes"}


def test_options_are_the_values_of_the_file(place: Path, init: Command) -> None:
    options = [
        "--model",
        "model",
        "--data",
        "tokens.bin",
        "--data",
        "m.bin",
        "--length",
        "64",
        "--name",
        "mine",
    ]
    options += ["--steps", "50", "--learning-rate", "0.01", "--precision", "bfloat16", "--evaluate", "10"]
    (place / "m.idx").unlink()
    code, out, err = init("jobs/a.toml", *options, "--nodes", "4", "--devices-per-node", "4", "--yes")
    assert code == 0, err
    assert "ftd local jobs/a.toml --nodes 4 --devices-per-node 4" in out
    tables = written(place / "jobs" / "a.toml")
    assert tables == {
        "name": "mine",
        "steps": 50,
        "model": {"huggingface": "../model"},
        "data": {"tokens": ["../tokens.bin", "../m.bin"], "length": 64},
        "training": {"global_batch": 64, "precision": "bfloat16"} | backend(),
        "optimizer": {"learning_rate": 0.01},
        "evaluation": {"every_steps": 10},
    }


def backend() -> dict[str, str]:
    return {"backend": "nccl"} if Path("/dev/nvidia0").exists() else {}


@pytest.mark.parametrize(
    ("options", "data"),
    [
        (["tokens.bin"], {"tokens": "tokens.bin"}),
        (["m.bin"], {"megatron": "m"}),
        (["m"], {"megatron": "m"}),
        (["saved"], {"huggingface": "saved"}),
        (["text.jsonl"], {"text": "text.jsonl", "tokenizer": "bytes"}),
        (["content.jsonl"], {"text": "content.jsonl", "field": "content", "tokenizer": "bytes"}),
        (
            ["unclear.jsonl", "--field", "body"],
            {"text": "unclear.jsonl", "field": "body", "tokenizer": "bytes"},
        ),
        (
            ["chat.jsonl", "--tokenizer", "tokenizer"],
            {"instructions": "chat.jsonl", "tokenizer": "tokenizer"},
        ),
        (["pair.jsonl"], {"instructions": "pair.jsonl", "tokenizer": "bytes"}),
    ],
)
def test_the_kind_of_data_is_recognised(
    place: Path, init: Command, options: list[str], data: dict[str, Any]
) -> None:
    code, _, err = init("--model", "llama", "--data", *options)
    assert code == 0, err
    assert written(place / "job.toml")["data"] == data


@pytest.mark.parametrize("home", ["~", "$PLACE"])
@pytest.mark.parametrize(
    ("name", "kind", "kept"),
    [
        ("tokens.bin", "tokens", "tokens.bin"),
        ("m.bin", "megatron", "m"),
        ("m", "megatron", "m"),
        ("saved", "huggingface", "saved"),
        ("images.npz", "images", "images.npz"),
        ("texts/*.txt", "text", "texts/*.txt"),
    ],
)
def test_the_kind_of_data_below_the_home_directory_or_a_variable_is_recognised(
    place: Path, monkeypatch: pytest.MonkeyPatch, home: str, name: str, kind: str, kept: str
) -> None:
    for variable in ("HOME", "PLACE"):
        monkeypatch.setenv(variable, str(place))
    monkeypatch.chdir(place / "jobs")
    assert data_table([f"{home}/{name}"], None, place / "jobs") == {kind: f"{home}/{kept}"}


def test_images_below_the_home_directory_determine_classes_and_sizes(
    place: Path, init: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place))
    assert init("--model", "vit", "--size", "tiny", "--data", "~/images.npz")[0] == 0
    overrides = written(place / "job.toml")["model"]["overrides"]
    assert overrides.items() >= {"num_labels": 3, "image_size": 16, "num_channels": 3}.items()


def test_images_determine_classes_and_sizes(place: Path, init: Command) -> None:
    assert init("--model", "vit", "--size", "tiny", "--data", "images.npz")[0] == 0
    model = written(place / "job.toml")["model"]
    assert model["task"] == "image-classification"
    assert model["overrides"].items() >= {"num_labels": 3, "image_size": 16, "num_channels": 3}.items()
    assert image_overrides(place / "images.npz", {"huggingface": "x"}) == {"num_labels": 3}
    whole = (place / "images.npz").read_bytes()
    for size in (0, len(whole) // 2):
        (place / "cut.npz").write_bytes(whole[:size])
        assert image_overrides(place / "cut.npz", {"architecture": "vit"}) == {}
    assert image_overrides(place / "tokens.bin", {"huggingface": "x"}) == {}


def test_the_tokenizer_of_the_model_is_used(place: Path, init: Command) -> None:
    (place / "model" / "tokenizer.json").write_text("{}")
    assert init("--model", "model", "--data", "text.jsonl")[0] == 0
    assert written(place / "job.toml")["data"] == {"text": "text.jsonl"}


def move_model_to_cache(place: Path) -> None:
    entry = place / "hub" / "models--meta--llama"
    for name in ("refs", "snapshots"):
        (entry / name).mkdir(parents=True)
    (entry / "refs" / "main").write_text("abc")
    (place / "model").rename(entry / "snapshots" / "abc")


@pytest.mark.parametrize("model", ["~/model", "meta/llama"])
def test_the_tokenizer_of_a_model_in_the_home_directory_or_the_local_cache_is_used(
    place: Path, init: Command, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "model" / "tokenizer.json").write_text("{}")
    if model == "meta/llama":
        move_model_to_cache(place)
    assert init("--model", model, "--data", "text.jsonl")[0] == 0
    assert written(place / "job.toml")["data"] == {"text": "text.jsonl"}


def test_a_name_in_the_local_cache_is_kept(place: Path, init: Command) -> None:
    move_model_to_cache(place)
    assert init("--model", "meta/llama", "--data", "tokens.bin")[0] == 0
    assert written(place / "job.toml")["model"] == {"huggingface": "meta/llama"}


@pytest.mark.parametrize(
    ("arguments", "following"),
    [
        (["job.toml", "--nodes", "3"], "ftd local job.toml --nodes 3"),
        (["my job.toml", "--name", "a", "--devices-per-node", "8"],
         "ftd local 'my job.toml' --nodes 2 --devices-per-node 8"),
        (["job.toml", "--nodes", "65"], "ftd submit job.toml"),
        (["job.toml", "--devices-per-node", "65"], "ftd submit job.toml"),
    ],
)  # fmt: skip
def test_the_next_command_can_be_run(init: Command, arguments: list[str], following: str) -> None:
    code, out, _ = init(*arguments, "--model", "llama", "--data", "tokens.bin")
    assert (code, out) == (0, f"wrote {arguments[0]}; next: {following}\n")


def test_a_function_replaces_model_and_data(place: Path, init: Command) -> None:
    (place / "train.py").write_text("def build(): ...\n")
    assert init("jobs/a.toml", "--function", "train.py:build", "--nodes", "1")[0] == 0
    tables = written(place / "jobs" / "a.toml")
    assert tables["training"]["function"] == "../train.py:build"
    assert tables["tolerance"] == {"failures": 0}
    assert "model" not in tables


def test_questions_are_asked_at_a_terminal(place: Path, init: Command) -> None:
    answers = ["gone/x", "llama", "huge", "tiny", "gone.txt", "text.jsonl", "tokenizer", "128", "", "20"]
    answers += ["float23", "bfloat16", "5", "0", "3", ""]
    code, out, err = init(answers="\n".join(answers) + "\n")
    assert code == 0, err
    assert "no model 'gone/x'" in out and "huge is not one of these" in out and "at least 1" in out
    tables = written(place / "job.toml")
    assert tables["model"]["overrides"]["num_hidden_layers"] == 4
    assert tables["data"] == {"text": "text.jsonl", "tokenizer": "tokenizer", "length": 128}
    assert (tables["name"], tables["steps"], tables["evaluation"]) == ("job", 20, {"every_steps": 5})
    assert tables["training"] == {"precision": "bfloat16"} | backend()
    assert "--nodes 3" in out


def test_options_answer_questions(place: Path, init: Command) -> None:
    code, out, _ = init("--model", "llama", "--size", "tiny", "--data", "tokens.bin", "--yes", answers="")
    assert code == 0 and "Model" not in out
    assert init("b.toml", "--function", "train.py:build", answers="\n" * 6)[0] == 2
    assert not (place / "b.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model: required (add --model, or run the command in a terminal)"),
        (["--model", "llama"], "--data: required"),
        (["--model", "gone/x", "--data", "tokens.bin"], "has no model 'gone/x'"),
        (["--model", "llama", "--data", "gone"], "--data: file of data gone does not exist"),
        (["--model", "llama", "--data", "texts"], "is a directory"),
        (["--model", "llama", "--data", "unclear.jsonl"], "--field: it is not clear which field"),
        (["--model", "llama", "--data", "text.jsonl", "--tokenizer", "texts"], "no tokenizer.json"),
        (
            ["--model", "model", "--data", "images.npz"],
            "job.toml: data.images: images cannot be used for the task causal-lm",
        ),
        (
            ["--model", "~nobody-here/m", "--data", "m.bin"],
            "--model: the home directory in ~nobody-here/m is not known here (write an absolute path instead)",
        ),
        (["--model", "llama", "--data", "~nobody-here/d"], "--data: the home directory in ~nobody-here/d is"),
        (["--model", "llama", "--function", "a.py:b"], "--function: a training function provides"),
        (
            ["--size", "large", "--field", "f", "--tokenizer", "bytes", "--function", "a.py:b"],
            "the data (leave out --size and --field and --tokenizer)",
        ),
        (
            ["--model", "model", "--size", "large", "--data", "tokens.bin"],
            "--size: it is for models that are built from an architecture (leave out --size)",
        ),
        (["--model", "llama", "--data", "tokens.bin", "--field", "body"], "--field: it is for texts"),
        (
            ["--model", "vit", "--data", "images.npz", "--tokenizer", "bytes"],
            "--tokenizer: images have no tokens",
        ),
        (["--function", "gone.py:build"], "job.toml: training.function:"),
        (
            ["--model", "vit", "--data", "images.npz", "--data", "images.npz"],
            "--data: the file of images images.npz cannot be read together with images.npz (give --data once)",
        ),
        (
            ["--model", "llama", "--data", "m.bin", "--data", "tokens.bin"],
            "--data: the Megatron data m cannot",
        ),
        (
            ["--model", "llama", "--data", "saved", "--data", "saved"],
            "--data: the saved data set saved cannot",
        ),
        (["--model", "llama", "--data", "tokens.bin", "--name", "a/b"], "job.toml: name:"),
        (["--model", "llama", "--data", "tokens.bin", "--learning-rate", "0"], "optimizer.learning_rate"),
        (
            ["--model", "llama", "--data", "caf\udce9.bin"],
            "not valid UTF-8, as a job file must be (rename the file)",
        ),
        (["gone/job.toml", "--model", "llama"], "the directory gone does not exist"),
        (["jobs", "--model", "llama"], "jobs already exists (name a file in it)"),
    ],
)
def test_wrong_input_is_rejected_and_nothing_is_written(
    place: Path, init: Command, arguments: list[str], says: str
) -> None:
    code, _, err = init(*arguments)
    assert code == 2
    assert says in err and ".new" not in err
    assert [path.name for path in place.rglob("*.toml*")] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["closed/job.toml", "--model", "llama", "--data", "tokens.bin"],
            "PATH: closed/job.toml cannot be written",
        ),
        (
            ["--model", "llama", "--data", "closed/tokens.bin"],
            "closed/tokens.bin cannot be read: Permission denied",
        ),
    ],
)
def test_a_directory_of_somebody_else_is_no_crash(
    init: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    usual = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    code, _, err = init(*arguments)
    assert code == 2 and says in err


def test_a_file_is_replaced_only_on_demand(place: Path, init: Command) -> None:
    (place / "job.toml").write_text("mine")
    code, _, err = init("--model", "llama", "--data", "tokens.bin")
    assert code == 2 and "add --force" in err
    assert (place / "job.toml").read_text() == "mine"
    assert init("--model", "llama", "--data", "gone", "--force")[0] == 2
    assert (place / "job.toml").read_text() == "mine"
    assert init("--model", "llama", "--data", "tokens.bin", "--force")[0] == 0
    assert written(place / "job.toml")["steps"] == 1000


def test_every_key_is_in_the_file_with_its_description_and_default() -> None:
    text = render_job(SMALLEST)
    assert max(map(len, text.splitlines())) <= 100
    for table in job_tables():
        assert f"[{table.name}]" in text or not table.name
        for key in table.keys:
            assert re.search(rf"^# .*\n(# .*\n)*#?{key.name} = ", text, re.MULTILINE), key.name
    assert "`" not in text


def test_every_commented_key_can_be_uncommented() -> None:
    uncommented = re.sub(r"(?m)^#(?=\S)", "", render_job(SMALLEST))
    file = msgspec.convert(tomllib.loads(uncommented), JobFile)
    assert file.model is not None and file.model.lora is not None
    assert file.evaluation.data is not None


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_consistent(size: str, tmp_path: Path) -> None:
    for architecture in ("llama", "bert", "gpt2"):
        sizes = model_table(architecture, size, tmp_path)["overrides"]
        assert sizes["hidden_size"] % sizes["num_attention_heads"] == 0
        assert ("intermediate_size" in sizes) is (architecture != "gpt2")


def test_a_large_cluster_has_a_batch_for_all_of_its_devices() -> None:
    tables = build_tables(JobChoices(name="x", nodes=8, devices_per_node=8))
    assert tables["training"]["global_batch"] == 4 * 64
