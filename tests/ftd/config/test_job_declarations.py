"""Tests that each key of a job file is declared once, and that its value reaches the code that uses it."""

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.config.job import JobFile, PlannerTable, TrainingTable, job_from_data, load_job_data
from ftd.config.job_reference import job_tables
from ftd.config.validation import member_types
from ftd.transport.wire.public import (
    CheckpointData,
    JobData,
    LoggingData,
    MlflowData,
    PolicyData,
    WandbData,
    decode_json,
    encode_json,
)
from planner.values import PlannerOptions, Policy
from statemachine.messages.trainer import TrainingData, TrainingOptions
from statemachine.messages.values import (
    CheckpointOptions,
    CheckpointPolicy,
    LoggingPolicy,
    MlflowPolicy,
    UpdatePolicy,
    WandbPolicy,
)
from tests.helpers.job_tables import write

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("planner", "statemachine", "storage", "runtime", "ftd")
OTHER_VALUES = {
    field.name: [value for value in get_args(field.type) if value != field.default]
    for field in msgspec.structs.fields(PlannerOptions)
}


def classes_that_declare(table: type[Any], key: str) -> list[type[Any]]:
    return [owner for owner in table.__mro__ if key in vars(owner).get("__annotations__", {})]


def words_of(kind: Any) -> frozenset[str]:
    return frozenset(
        str(word) for one in member_types(kind) for word in get_args(one) if isinstance(word, str)
    )


def tables_below(table: type[Any]) -> list[type[Any]]:
    below = [table]
    for field in msgspec.structs.fields(table):
        for kind in member_types(field.type):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                below += tables_below(kind)
    return below


def test_the_values_of_a_key_are_listed_once_in_the_product() -> None:
    wanted = {
        words
        for table in tables_below(JobFile)
        for field in msgspec.structs.fields(table)
        if len(words := words_of(field.type)) > 1
    }
    listed: Counter[frozenset[str]] = Counter()
    for path in (path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=elements)):
                    listed[frozenset(e.value for e in elements if isinstance(e, ast.Constant))] += 1  # type: ignore[misc]
    repeated = {tuple(sorted(words)): listed[words] for words in wanted if listed[words] != 1}
    assert not repeated


@pytest.mark.parametrize(
    ("table", "carried_by", "shared"),
    [
        (TrainingTable, TrainingData, TrainingOptions),
        (TrainingTable, UpdatePolicy, UpdatePolicy),
        (CheckpointData, CheckpointPolicy, CheckpointOptions),
        (LoggingData, LoggingPolicy, LoggingPolicy),
        (WandbData, WandbPolicy, WandbPolicy),
        (MlflowData, MlflowPolicy, MlflowPolicy),
    ],
)
def test_keys_shared_with_a_message_are_declared_in_one_class(
    table: type[Any], carried_by: type[Any], shared: type[Any]
) -> None:
    for key in shared.__struct_fields__:
        declared = classes_that_declare(shared, key)[-1]
        assert classes_that_declare(table, key)[-1] is classes_that_declare(carried_by, key)[-1] is declared


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 7),
        ("precision", "bfloat16"),
        ("compile", True),
        ("activation_checkpointing", "full"),
        ("backend", "nccl"),
        ("zero1", True),
        ("max_skipped", 5),
        ("on_spike", "skip"),
        ("spike_deviations", 6.5),
        ("spike_window", 20),
        ("compare_replicas_every", 7),
    ],
)
def test_a_choice_of_training_reaches_the_trainers(tmp_path: Path, key: str, value: Any) -> None:
    file = {"name": "gpt", "steps": 10, "training": {"function": "train.py:build", key: value}}
    data = load_job_data(write(tmp_path, {**file, "snapshot": {"every_steps": 1}}))
    job = job_from_data(data, job_id="gpt-1", devices_per_node=1)
    assert getattr(msgspec.convert(job.training, TrainingData), key) == value
    assert key not in UpdatePolicy.__struct_fields__ or getattr(job.updates, key) == value
    default = next(f.default for f in msgspec.structs.fields(TrainingOptions) if f.name == key)
    assert value != default


def test_every_choice_of_training_is_tried() -> None:
    (mark,) = test_a_choice_of_training_reaches_the_trainers.pytestmark  # type: ignore[attr-defined]
    assert {key for key, _ in mark.args[1]} == set(TrainingOptions.__struct_fields__)


@pytest.mark.parametrize("key", PlannerOptions.__struct_fields__)
def test_a_choice_of_the_planner_is_declared_in_one_class(key: str) -> None:
    """A default may be declared again for jobs that were submitted without the key."""
    for owner in (PlannerTable, PolicyData, Policy):
        assert classes_that_declare(owner, key)[-1] is PlannerOptions
    shown = [entry for table in job_tables() for entry in table.keys if entry.name == key]
    assert len(shown) == 1 and shown[0].meaning


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, values in OTHER_VALUES.items() for v in values])
def test_a_choice_of_the_planner_reaches_the_planner(tmp_path: Path, key: str, value: Any) -> None:
    training = {"function": "train.py:build"}
    path = write(tmp_path, {"name": "gpt", "steps": 10, "training": training, "planner": {key: value}})
    data = decode_json(encode_json(load_job_data(path)), JobData)
    policy = job_from_data(data, job_id="gpt-1", devices_per_node=2).policy
    plain = load_job_data(write(tmp_path, {"name": "gpt", "steps": 10, "training": training}))
    expected = job_from_data(plain, job_id="gpt-1", devices_per_node=2).policy
    assert policy == msgspec.structs.replace(expected, **{key: value}) != expected


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, values in OTHER_VALUES.items() for v in values])
def test_a_choice_of_the_planner_is_an_option(tmp_path: Path, key: str, value: str) -> None:
    layer = {"forward_ms": 1.0, "backward_ms": 3.0, "allreduce_in_node_ms": {"1": 0.0, "2": 0.5}}
    profile = tmp_path / "bare.json"
    profile.write_text(json.dumps({"kind": "test", "layers": [layer] * 4}))
    asked = ["plan", "--profile", profile, "--nodes", 2, "--json", f"--{key.replace('_', '-')}", value]
    done = CliRunner().invoke(app, [*map(str, asked)], catch_exceptions=False)
    assert json.loads(done.stdout)[key] == value
