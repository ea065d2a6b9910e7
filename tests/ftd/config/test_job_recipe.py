"""Tests of job files with ``[model]``: defaults, what reaches the trainers, and errors with their remedies."""

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftd.config.job import load_job, load_job_data
from ftd.config.job_choices import data_table
from ftd.config.models import task_of
from ftd.errors import ConfigurationError
from runtime.sources.errors import find_files
from runtime.wire.recipe import (
    RECIPE,
    DataTable,
    EvaluationTable,
    FileTotals,
    LoraTable,
    OptimizerTable,
    Recipe,
    ScheduleTable,
)
from statemachine.messages.trainer import TrainingData
from tests.helpers.job_tables import write

SMALLEST: dict[str, Any] = {
    "name": "llama",
    "steps": 100,
    "model": {"huggingface": "model"},
    "data": {"tokens": "tokens/*.bin"},
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Directory with a model, data of all kinds and a tokenizer, sufficient for the checks of a job file."""
    for name in ("model", "tokens", "texts", "tokenizer", "saved", "splits/train", "splits/test"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    for name in ("model/model.safetensors", "saved/state.json", "splits/dataset_dict.json", "m.bin", "m.idx"):
        (tmp_path / name).write_text("")
    (tmp_path / "tokens" / "a.bin").write_bytes(bytes(4096))
    (tmp_path / "tokens" / "b.bin").write_bytes(bytes(2049))
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path


def loaded(place: Path, tables: dict[str, Any]) -> tuple[TrainingData, Recipe]:
    training = msgspec.convert(load_job(write(place, tables)).training, TrainingData)
    return training, msgspec.convert(training.arguments, Recipe)


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest file with these values; None removes one."""
    tables = copy.deepcopy(SMALLEST)
    for path, value in changes.items():
        *way, last = path.split(".")
        inner = tables
        for step in way:
            inner = inner.setdefault(step, {})
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return tables


def test_a_model_and_data_are_sufficient(place: Path) -> None:
    training, recipe = loaded(place, SMALLEST)
    assert training.function == RECIPE
    assert training.path == str(place)
    assert (training.global_batch, training.microbatch_rows, training.clip_gradient_norm) == (32, 4, 1.0)
    assert (training.data_workers, training.evaluation_every_steps, training.evaluation_batches) == (0, 0, 0)
    assert recipe.steps == 100
    assert (recipe.model.huggingface, recipe.model.task) == (str(place / "model"), "causal-lm")
    assert recipe.data == DataTable(tokens=[str(place / "tokens" / "*.bin")])
    assert recipe.optimizer == OptimizerTable()
    assert recipe.schedule == ScheduleTable()
    assert recipe.evaluation == EvaluationTable()
    assert recipe.files == {
        "model.huggingface": FileTotals(files=2, bytes=len(json.dumps(LLAMA))),
        "data.tokens": FileTotals(files=2, bytes=4096 + 2049),
    }


def test_every_table_reaches_the_trainers(place: Path) -> None:
    tables = changed(
        {
            "training.clip_gradient_norm": 0,
            "training.global_batch": 16,
            "model.overrides": {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default"}},
            "model.lora": {"rank": 4, "target_modules": ["q_proj"]},
            "data.tokens": None,
            "data.text": ["texts/*.jsonl", "texts/a.jsonl"],
            "data.tokenizer": "tokenizer",
            "data.packing": False,
            "data.cache": "kept",
            "data.workers": 2,
            "optimizer": {"name": "sgd", "momentum": 0.5, "learning_rate": 1},
            "schedule": {"name": "wsd", "warmup_steps": 10, "decay_ratio": 0.2},
            "evaluation": {"every_steps": 20, "batches": 2, "data": {"tokens": "tokens/a.bin"}},
        }
    )
    training, recipe = loaded(place, tables)
    assert (training.clip_gradient_norm, training.global_batch, training.data_workers) == (None, 16, 2)
    assert (training.evaluation_every_steps, training.evaluation_batches) == (20, 2)
    assert recipe.model.overrides["rope_parameters"] == {"rope_type": "default"}
    assert recipe.model.lora == LoraTable(rank=4, target_modules=["q_proj"])
    assert recipe.data == DataTable(
        text=[str(place / "texts" / "*.jsonl"), str(place / "texts" / "a.jsonl")],
        tokenizer=str(place / "tokenizer"),
        packing=False,
        cache=str(place / "kept"),
        workers=2,
    )
    assert recipe.optimizer == OptimizerTable(name="sgd", momentum=0.5, learning_rate=1.0)
    assert recipe.schedule == ScheduleTable(name="wsd", warmup_steps=10, decay_ratio=0.2)
    assert recipe.evaluation == EvaluationTable(
        every_steps=20, batches=2, data=DataTable(tokens=[str(place / "tokens" / "a.bin")])
    )


def test_an_evaluation_holds_out_a_hundredth_by_default(place: Path) -> None:
    _, recipe = loaded(place, changed({"evaluation.every_steps": 5}))
    assert recipe.evaluation.fraction == 0.01
    _, recipe = loaded(place, changed({"evaluation.every_steps": 5, "evaluation.fraction": 0.2}))
    assert recipe.evaluation.fraction == 0.2


def test_an_architecture_alone_is_a_model(place: Path) -> None:
    changes = {"model.huggingface": None, "model.architecture": "llama", "model.overrides": {"vocab_size": 9}}
    _, recipe = loaded(place, changed(changes))
    assert (recipe.model.architecture, recipe.model.huggingface, recipe.model.task) == ("llama", None, None)


def test_text_uses_the_tokenizer_of_the_model_or_bytes(place: Path) -> None:
    text = {"data.tokens": None, "data.text": "texts/*.jsonl"}
    _, recipe = loaded(place, changed({**text, "data.tokenizer": "bytes"}))
    assert recipe.data.tokenizer == "bytes"
    _, recipe = loaded(place, changed({**text, "data.tokenizer": "tokenizer/tokenizer.json"}))
    assert recipe.data.tokenizer == str(place / "tokenizer" / "tokenizer.json")
    (place / "model" / "tokenizer.json").write_text("{}")
    _, recipe = loaded(place, changed(text))
    assert recipe.data.tokenizer == str(place / "model")


def test_steps_on_the_command_line_reach_the_schedule(place: Path) -> None:
    data = load_job_data(write(place, changed({"schedule.warmup_steps": 50})), steps=20)
    assert data.training["arguments"]["steps"] == 20


def test_paths_may_begin_at_home_or_have_variables(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("CORPUS", str(place / "tokens"))
    _, recipe = loaded(place, changed({"model.huggingface": "~/model", "data.tokens": "$CORPUS/a.bin"}))
    assert recipe.model.huggingface == str(place / "model")
    assert recipe.data.tokens == [str(place / "tokens" / "a.bin")]


def test_a_user_without_a_home_directory_has_no_local_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigurationError, match=r"model\.huggingface: the home directory in ~/\.cache/"):
        load_job_data(write(place, changed({"model.huggingface": "gone/x"})))


def test_a_pattern_is_found_from_a_directory_whose_name_looks_like_one(place: Path) -> None:
    there = place / "run [1]*"
    there.mkdir()
    (place / "tokens").rename(there / "tokens")
    (there / "c[1].bin").write_bytes(bytes(64))
    named = ["tokens/a*.bin", "tokens/b.bin", "c[1].bin"]
    tables = changed({"data.tokens": named, "data.dtype": "uint8", "model": {"architecture": "llama"}})
    _, recipe = loaded(there, tables)
    assert isinstance(recipe.data.tokens, list)
    files = find_files(recipe.data.tokens, "token file")
    assert files == [there / "tokens/a.bin", there / "tokens/b.bin", there / "c[1].bin"]


def test_a_saved_data_set_that_cannot_be_entered_is_rejected(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "saved":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    tables = changed({"data": {"huggingface": "saved"}})
    with pytest.raises(ConfigurationError, match=r"data\.huggingface: .*saved/.* cannot be read: Permission"):
        load_job_data(write(place, tables))
    with pytest.raises(ConfigurationError, match=r"--data: .*saved/.* cannot be read: Permission"):
        data_table([str(place / "saved")], None, place)


def test_a_name_is_looked_up_in_the_local_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    entry = place / "hub" / "models--meta--llama"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("abc\n")
    (entry / "snapshots").mkdir()
    (place / "model").rename(entry / "snapshots" / "abc")
    _, recipe = loaded(place, changed({"model.huggingface": "meta/llama"}))
    assert recipe.model.huggingface == str(entry / "snapshots" / "abc")


@pytest.mark.parametrize(
    ("architectures", "task"),
    [
        (["LlamaForCausalLM"], "causal-lm"),
        (["GPT2LMHeadModel"], "causal-lm"),
        (["BertForMaskedLM"], "masked-lm"),
        (["T5ForConditionalGeneration"], "seq2seq-lm"),
        (["ViTForImageClassification"], "image-classification"),
        (["BertForSequenceClassification"], "sequence-classification"),
        (["BertModel"], None),
        ([], None),
        (None, None),
        ([3], None),
    ],
)
def test_the_task_follows_from_the_class_in_the_configuration(architectures: Any, task: str | None) -> None:
    assert task_of(architectures) == task


ARCHITECTURE = {"model.huggingface": None, "model.architecture": "llama"}
TEXT = {"data.tokens": None, "data.text": "texts/*.jsonl", "data.tokenizer": "tokenizer"}


LONG = "x" * 300
"""A name that cannot be looked up, as that of a file in a directory that this user may not enter."""


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model.huggingfce": "x"}, "model.huggingfce", "did you mean 'huggingface'"),
        ({"model.huggingface": None}, "model.huggingface", 'or architecture = "llama"'),
        ({"model.huggingface": 3}, "model.huggingface", "expected text in quotes, got a whole number"),
        ({"model.huggingface": "gone"}, "model.huggingface", "hf download gone"),
        ({"model.huggingface": "tokens"}, "model.huggingface", "has no config.json"),
        ({"model.huggingface": "$NOWHERE/x"}, "model.huggingface", "not set"),
        ({"model.architecture": "llama"}, "model.architecture", "remove architecture or huggingface"),
        ({"model.task": "causal"}, "model.task", "did you mean 'causal-lm'"),
        ({"model.weights": "some"}, "model.weights", "known: auto, random, required"),
        ({"model.attention": "flash"}, "model.attention", "known: eager, sdpa"),
        ({"model.overrides.device_map": "auto"}, "model.overrides", "ftd places the layers"),
        ({"model.overrides.torch_dtype": "bfloat16"}, "model.overrides", 'precision = "bfloat16"'),
        ({"model.overrides.quantization_config": {}}, "model.overrides", "full precision"),
        ({**ARCHITECTURE, "model.weights": "required"}, "model.weights", 'huggingface = "DIRECTORY"'),
        ({**ARCHITECTURE, "model.lora.rank": 8}, "model.lora", 'weights = "random"'),
        ({"model.lora.rank": 0}, "model.lora.rank", "write a number of at least 1"),
        ({"model.lora.dropout": 1.0}, "model.lora.dropout", "write a number below 1"),
        ({"model.lora.alpha": float("inf")}, "model.lora.alpha", "write a number of at most 1e+30"),
        ({"model.lora.rnk": 8}, "model.lora.rnk", "did you mean 'rank'"),
        ({"training.function": "train.py:build"}, "training.function", "remove function or the table"),
        ({"training.arguments": {"a": 1}}, "training.arguments", "remove arguments or the table"),
        ({"data.tokens": None}, "data.text", "write one of tokens, text, instructions, megatron"),
        ({"data": None}, "data.text", "the table names no data"),
        ({"data.text": "x"}, "data.text", "tokens and text exclude each other"),
        ({"data.tokens": "gone/*.bin"}, "data.tokens", "relative to the job file"),
        ({"data.tokens": "tokens"}, "data.tokens", "is a directory"),
        ({"data.tokens": [1]}, "data.tokens[0]", "expected text in quotes"),
        (
            {"data.dtype": "uint16"},
            "data.tokens",
            "b.bin has 2049 bytes, which is not a multiple of 2, the size of uint16",
        ),
        ({"data.dtype": "float32"}, "data.dtype", "is not known"),
        ({"data.packing": False}, "data.packing", "it does not apply to tokens, only to text"),
        ({"data.length": 0}, "data.length", "write a number of at least 1"),
        ({"data.collate": "pad"}, "data.tokenizer", '"bytes" for one token per byte'),
        ({"model.task": "masked-lm"}, "data.tokenizer", '"bytes" for one token per byte'),
        ({"model.task": "masked-lm", "data.collate": "pad"}, "data.collate", "nothing to predict"),
        ({"data.collate": "masked-lm"}, "data.collate", "the task of this model is causal-lm"),
        ({"data.mask_probability": 0}, "data.mask_probability", "write a number above 0"),
        ({"data.workers": -1}, "data.workers", "write a number of at least 0"),
        ({"data.tokens": None, "data.text": "texts/*"}, "data.tokenizer", "this data needs a tokenizer"),
        ({**TEXT, "data.tokenizer": "tokens"}, "data.tokenizer", "has no tokenizer.json"),
        ({**TEXT, "data.dtype": "uint16"}, "data.dtype", "it does not apply to text"),
        (
            {"data.tokens": None, "data.instructions": "texts/*", "model.task": "masked-lm"},
            "data.instructions",
            "instructions cannot be used for the task masked-lm",
        ),
        ({"data.tokens": None, "data.instructions": "texts/*"}, "data.tokenizer", "needs a tokenizer"),
        (
            {"data.tokens": None, "data.images": "gone.npz", "model.task": "image-classification"},
            "data.images",
            "gone.npz does not exist",
        ),
        (
            {"data.tokens": None, "data.images": "texts", "model.task": "image-classification"},
            "data.images",
            "texts is a directory, not a file",
        ),
        (
            {"data.tokens": None, "data.images": LONG, "model.task": "image-classification"},
            "data.images",
            "cannot be read: File name too long",
        ),
        ({"data.tokens": None, "data.megatron": LONG}, "data.megatron", "cannot be read: File name too long"),
        (
            {"data.tokens": None, "data.huggingface": LONG},
            "data.huggingface",
            "cannot be read: File name too",
        ),
        ({"data.tokens": LONG}, "data.tokens", "cannot be read: File name too long"),
        ({"data.tokenizer": LONG}, "data.tokenizer", "cannot be read: File name too long"),
        ({"model.huggingface": LONG}, "model.huggingface", "cannot be read: File name too long"),
        ({"data.tokens": None, "data.megatron": "n"}, "data.megatron", "n.idx does not exist"),
        ({"data.tokens": None, "data.huggingface": "texts"}, "data.huggingface", "save_to_disk"),
        ({"data.tokens": None, "data.huggingface": "splits"}, "data.huggingface", "splits/test"),
        ({"model.task": "image-classification"}, "data.tokens", "use one of images, huggingface"),
        ({"optimizer.name": "admw"}, "optimizer.name", "did you mean 'adamw'"),
        ({"optimizer.learning_rate": 0}, "optimizer.learning_rate", "write a number above 0"),
        ({"optimizer.betas": [0.9]}, "optimizer.betas", "expected 2 values, got 1"),
        ({"optimizer.betas": [0.9, 1.5]}, "optimizer.betas[1]", "write a number below 1"),
        ({"optimizer.momentum": 0.5}, "optimizer.momentum", "adamw does not have this key, only sgd"),
        ({"optimizer": {"name": "sgd", "eps": 1e-5}}, "optimizer.eps", "only adamw and adam"),
        (
            {"optimizer.name": "adafactor", "planner.within_node": "shard"},
            "optimizer.name",
            'planner.within_node = "replicate"',
        ),
        (
            {"optimizer.name": "adafactor", "training.zero1": True},
            "optimizer.name",
            "remove training.zero1",
        ),
        ({"schedule.name": "cosin"}, "schedule.name", "did you mean 'cosine'"),
        (
            {"schedule.warmup_steps": 100},
            "schedule.warmup_steps",
            "a warm-up of 100 steps is not shorter than the job",
        ),
        ({"schedule": {"warmup_steps": 9, "warmup_ratio": 0.1}}, "schedule.warmup_ratio", "remove"),
        ({"schedule.decay_ratio": 0.5}, "schedule.decay_ratio", "cosine does not have this key, only wsd"),
        ({"schedule.final_ratio": 2}, "schedule.final_ratio", "write a number of at most 1"),
        ({"evaluation.fraction": 0.1}, "evaluation.every_steps", "write for example every_steps = 100"),
        ({"evaluation": {"every_steps": 5, "fraction": 0.6}}, "evaluation.fraction", "at most 0.5"),
        (
            {"evaluation": {"every_steps": 5, "fraction": 0.1, "data": {"tokens": "tokens/a.bin"}}},
            "evaluation.fraction",
            "fraction and [evaluation.data] exclude each other",
        ),
        (
            {"evaluation": {"every_steps": 5, "data": {"tokens": "tokens/c.bin"}}},
            "evaluation.data.tokens",
            "does not exist",
        ),
        ({"evaluation": {"every_steps": 5, "data": {}}}, "evaluation.data.text", "names no data"),
    ],
)
def test_every_error_names_its_field_and_the_remedy(
    place: Path, changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_job(write(place, changed(changes)))
    [error] = caught.value.errors
    assert error.field == f"job.toml: {field}"
    assert says in str(error)


@pytest.mark.parametrize(
    ("files", "changes", "says"),
    [
        ({"config.json": "{"}, {}, "config.json cannot be read"),
        ({"config.json": "[]"}, {}, "has no model_type"),
        ({"config.json": '{"model_type": "llama", "quantization_config": {}}'}, {}, "quantised"),
        ({"model.safetensors.index.json": "{}"}, {}, "is not an index of safetensors"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors", "c": "d.safetensors"}}'},
            {},
            "files of the weights are missing in ",
        ),
        ({"model.safetensors": None, "pytorch_model.bin": ""}, {}, "pickled (pytorch_model.bin)"),
        ({"model.safetensors": None}, {"model.weights": "required"}, "has no *.safetensors"),
        ({"model.safetensors": None}, {"model.lora.rank": 2}, "LoRA adapts a trained model"),
    ],
)
def test_a_directory_without_a_valid_model_is_rejected(
    place: Path, files: dict[str, str | None], changes: dict[str, Any], says: str
) -> None:
    for name, content in files.items():
        if content is None:
            (place / "model" / name).unlink()
        else:
            (place / "model" / name).write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        load_job(write(place, changed(changes)))
    assert says in str(caught.value)


def test_all_errors_are_reported_together(place: Path) -> None:
    changes = {"model.huggingface": "gone", "data.tokens": "gone", "optimizer.eps": -1, "schedule.name": "x"}
    with pytest.raises(ConfigurationError) as caught:
        load_job(write(place, changed(changes)))
    found = [error.field for error in caught.value.errors]
    names = ("optimizer.eps", "schedule.name", "model.huggingface", "data.tokens")
    assert found == [f"job.toml: {name}" for name in names]
