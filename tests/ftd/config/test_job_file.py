"""Tests of job files: their conversion to jobs, and errors that name the field and the remedy."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftd.config import tracking
from ftd.config.job import job_from_data, load_job, load_job_data, profile_from_data
from ftd.config.profile_file import save_profile
from ftd.config.tracking import check_installed, sinks_of
from ftd.errors import ConfigurationError
from ftd.transport.wire.public import (
    JobData,
    LoggingData,
    MlflowData,
    SnapshotData,
    WandbData,
    decode_json,
    encode_json,
)
from planner.values import LayerProfile, ModelProfile, Policy, SplitTime
from runtime.import_conflicts import OUR_PACKAGES
from statemachine.messages.trainer import TrainingData
from statemachine.messages.values import LoggingPolicy, MlflowPolicy, WandbPolicy
from tests.helpers.job_tables import write
from tests.helpers.profile_files import profile_document

ROOT = Path(__file__).resolve().parents[3]
GOOD: dict[str, Any] = {
    "name": "gpt",
    "steps": 10,
    "training": {"function": "train.py:build", "global_batch": 32, "microbatch": 4},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    tables = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    inner = tables
    for step in way:
        inner = inner.setdefault(step, {})
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return tables


def test_a_job_file_becomes_a_job(tmp_path: Path) -> None:
    tables = copy.deepcopy(GOOD)
    tables["training"] |= {
        "seed": 7,
        "precision": "float64",
        "clip_gradient_norm": 1.5,
        "activation_checkpointing": "selective",
        "arguments": {"layers": 3, "name": "x", "rate": 0.5, "tied": True},
    }
    tables["tolerance"] = {"failures": 2, "minimum": "oobleck"}
    tables["planner"] = {
        "objective": "paper",
        "split": "aligned",
        "batch_objective": "variance",
        "batch_solver": "pyomo",
        "within_node": "shard",
        "device_memory_mib": 1.5,
        "horizon_s": 3600.0,
    }
    job = load_job(write(tmp_path, tables), devices_per_node=2)
    assert job.name == "gpt" and job.job_id.startswith("gpt-") and job.steps == 10
    assert job.policy == Policy(
        devices_per_node=2,
        tolerate=2,
        global_batch=32,
        microbatch_rows=4,
        minimum="oobleck",
        objective="paper",
        split="aligned",
        batch_objective="variance",
        batch_solver="pyomo",
        activation_checkpointing="selective",
        device_memory_bytes=3 * 2**19,
        within_node="shard",
    )
    assert job.horizon_s == 3600.0
    training = msgspec.convert(job.training, TrainingData)
    assert training.within_node == "shard"
    assert training.function == f"{tmp_path.resolve()}/train.py:build"
    assert training.path == str(tmp_path.resolve())
    assert training.arguments == {"layers": 3, "name": "x", "rate": 0.5, "tied": True}
    assert (training.steps, training.seed, training.precision) == (10, 7, "float64")


@pytest.mark.parametrize("name", ["gpt", "llama", "mlp"])
def test_the_examples_are_valid(name: str) -> None:
    assert load_job(ROOT / "examples" / f"{name}.toml", steps=3).steps == 3


def test_a_submitted_job_survives_the_wire(tmp_path: Path) -> None:
    data = load_job_data(write(tmp_path, GOOD))
    assert decode_json(encode_json(data), JobData) == data


@pytest.mark.parametrize(
    ("path", "value", "field", "says"),
    [
        ("naame", "x", "naame", "did you mean 'name'"),
        ("name", None, "name", "add name"),
        ("name", "a b", "name", "letters"),
        ("steps", None, "steps", "required"),
        ("steps", 0, "steps", "above 0"),
        ("steps", 2**63, "job.toml: steps", "write a number from -2^63 to 2^63 - 1"),
        ("steps", 1.5, "steps", "expected a whole number, got a fraction"),
        ("training", None, "training.function", "or add a table [model]"),
        ("training.function", None, "training.function", "or add a table [model]"),
        ("training.function", "train.py", "training.function", "file.py:function"),
        ("training.function", "train.py:not a name", "training.function", "file.py:function"),
        ("training.function", "no-module:build", "training.function", "file.py:function"),
        ("training.function", "gone.py:build", "training.function", "does not exist"),
        ("training.globalbatch", 3, "training.globalbatch", "did you mean 'global_batch'"),
        ("training.global_batch", 0, "training.global_batch", "above 0"),
        ("training.global_batch", 30, "training.global_batch", "28 or 32"),
        ("training.global_batch", 31, "training.global_batch", "32 or 28"),
        ("training.global_batch", 33, "training.global_batch", "32 or 36"),
        ("training.global_batch", 3, "training.global_batch", "write 4"),
        ("training.microbatch", -4, "training.microbatch", "above 0"),
        ("training.microbatch", 64, "training.global_batch", "64"),
        ("training.seed", -1, "training.seed", "2^63"),
        ("training.max_skipped", -1, "training.max_skipped", "or 0 if the job must never fail"),
        ("training.spike_deviations", 0.0, "training.spike_deviations", "write a positive number"),
        ("training.spike_deviations", float("inf"), "training.spike_deviations", "write a positive number"),
        ("training.arguments", {"limit": [float("inf")]}, "training.arguments.limit[0]", "a finite number"),
        (
            "model",
            {"architecture": "gpt2", "overrides": {"x": float("nan")}},
            "model.overrides.x",
            "a finite number",
        ),
        ("training.spike_window", 2**70, "job.toml: training.spike_window", "does not fit into 64 bits"),
        ("training.arguments", {"x": [1, -(2**64)]}, "training.arguments.x[1]", "does not fit into 64 bits"),
        ("training.spike_window", 2, "training.spike_window", "a number from 3"),
        ("training.on_spike", "skip", "training.on_spike", "set snapshot.every_steps"),
        ("training.precision", "float23", "training.precision", "did you mean 'float32'"),
        ("training.backend", "mpi", "training.backend", "gloo"),
        ("training.clip_gradient_norm", -1.0, "training.clip_gradient_norm", "of at least 0"),
        (
            "data.tokens",
            "x",
            "data",
            "the training function decides this (with training.function, only workers",
        ),
        ("data.worker", 1, "data.worker", "did you mean 'workers'"),
        ("optimizer.name", "sgd", "optimizer", "remove the table"),
        ("schedule.warmup_steps", 1, "schedule", "remove the table"),
        ("evaluation", {"every_steps": 5, "fraction": 0.1}, "evaluation", "every_steps and batches"),
        ("evaluation.batches", 3, "evaluation.every_steps", "write for example every_steps = 100"),
        ("tolerance.failures", -1, "tolerance.failures", "0 or more"),
        ("tolerance.minimum", "two", "tolerance.minimum", "two"),
        ("tolerance.failure", 1, "tolerance.failure", "did you mean 'failures'"),
        ("planner.objective", "speed", "planner.objective", "speed"),
        ("planner.device_memory_mib", 0, "planner.device_memory_mib", "above 0"),
        ("planner.device_memory_mib", 1e305, "planner.device_memory_mib", "from 0.001 to 2^42"),
        ("planner.device_memory_mib", 1e-9, "planner.device_memory_mib", "from 0.001 to 2^42"),
        ("planner.split", "some", "planner.split", "some"),
        ("planner.batch_objective", "mean", "planner.batch_objective", "mean"),
        ("planner.within_node", "split", "planner.within_node", "'split'"),
        ("planner.horizon_s", 0, "planner.horizon_s", "above 0"),
        ("planner.horizon_s", -5.0, "planner.horizon_s", "above 0"),
        ("planner.horizons_s", 5.0, "planner.horizons_s", "did you mean 'horizon_s'"),
        ("planner.profile", 5, "planner.profile", "expected text in quotes, got a whole number"),
        ("planner.profile", "gone.json", "gone.json", "does not exist"),
        ("planner.profile", "job.toml", "job.toml", "not valid JSON"),
    ],
)
def test_every_error_names_its_field_and_the_remedy(
    tmp_path: Path, path: str, value: Any, field: str, says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_job(write(tmp_path, changed(path, value)))
    assert field in str(caught.value)
    assert says in str(caught.value)


def test_a_number_of_thousands_of_digits_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'name = "gpt"\nsteps = {"1" * 5000}\n')
    with pytest.raises(ConfigurationError, match=r"job\.toml is not valid TOML: .*5000 digits"):
        load_job(path)


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    data = changed("training.microbatch", -1) | {"steps": 0, "snapshots": {}, "name": "a/b"}
    with pytest.raises(ConfigurationError) as caught:
        load_job(write(tmp_path, data))
    fields = [error.field for error in caught.value.errors]
    names = ("snapshots", "name", "steps", "training.microbatch")
    assert fields == [f"job.toml: {name}" for name in names]


def saved_profile(directory: Path, layers: int = 3) -> ModelProfile:
    layer = LayerProfile(
        forward_ms=1 / 3,
        backward_ms=0.1,
        parameter_bytes=1,
        gradient_bytes=2,
        optimizer_bytes=3,
        activation_bytes=4,
        output_bytes=5,
        split=(SplitTime(devices=2, forward_ms=0.25, backward_ms=0.1),),
    )
    profile = ModelProfile(layers=(layer,) * layers, microbatch_rows=4, device_memory_bytes=10**9)
    save_profile(directory / "saved.json", profile_document(profile))
    return profile


def test_a_profile_named_in_the_job_file_is_submitted_with_it(tmp_path: Path) -> None:
    path = write(tmp_path, changed("planner.profile", "saved.json"))
    profile = saved_profile(tmp_path)
    data = decode_json(encode_json(load_job_data(path)), JobData)
    assert profile_from_data(data) == profile, "to the last bit"
    assert job_from_data(data, job_id="j", devices_per_node=1).training["profile_given"], (
        "trainers verify layers that nobody measures"
    )
    without = load_job_data(write(tmp_path, GOOD))
    assert profile_from_data(without) is None
    assert not job_from_data(without, job_id="j", devices_per_node=1).training["profile_given"]


def test_a_profile_that_is_too_large_is_rejected_before_it_is_sent(tmp_path: Path) -> None:
    path = write(tmp_path, changed("planner.profile", "saved.json"))
    saved_profile(tmp_path, layers=1000)
    load_job_data(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftd.config.job._MAX_PROFILE_BYTES", 100_000)
        with pytest.raises(ConfigurationError, match=r"planner\.profile: the profile of 1000 layers takes"):
            load_job_data(path)


def test_an_invalid_submitted_profile_is_rejected(tmp_path: Path) -> None:
    data = load_job_data(write(tmp_path, GOOD))
    with pytest.raises(ConfigurationError, match=r"planner\.profile"):
        profile_from_data(msgspec.structs.replace(data, profile={"layers": [1]}))


@pytest.mark.parametrize("name", OUR_PACKAGES)
@pytest.mark.parametrize("shape", ["module", "package"])
def test_a_module_that_would_hide_our_package_is_rejected(tmp_path: Path, name: str, shape: str) -> None:
    path = write(tmp_path, GOOD)
    if shape == "module":
        (tmp_path / f"{name}.py").write_text("")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    with pytest.raises(ConfigurationError, match=f"own package '{name}'.*rename"):
        load_job(path)


def test_a_directory_without_code_hides_no_package(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "data.bin").write_text("")
    load_job(path)


def test_a_job_from_the_wire_is_checked_again(tmp_path: Path) -> None:
    data = load_job_data(write(tmp_path, GOOD))
    for bad, says in [
        (msgspec.structs.replace(data, name="a/b"), "name"),
        (msgspec.structs.replace(data, steps=11), "different steps"),
        (msgspec.structs.replace(data, training={"function": "x"}), "training"),
        (
            msgspec.structs.replace(data, policy=msgspec.structs.replace(data.policy, within_node="shard")),
            "training has auto, but policy has shard",
        ),
        (
            msgspec.structs.replace(data, policy=msgspec.structs.replace(data.policy, microbatch_rows=5)),
            "30 or 35",
        ),
    ]:
        with pytest.raises(ConfigurationError, match=says):
            job_from_data(bad, job_id="x", devices_per_node=1)
    with pytest.raises(ConfigurationError, match="devices_per_node"):
        job_from_data(data, job_id="x", devices_per_node=0)


def test_snapshots_are_off_until_a_job_file_asks_for_them(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, GOOD)).snapshot.every_steps == 0
    tables = changed("snapshot.every_steps", 5) | {"snapshot": {"every_steps": 5, "protection": "aec+arc:1"}}
    snapshot = load_job(write(tmp_path, tables)).snapshot
    assert (snapshot.every_steps, snapshot.protection) == (5, "aec+arc:1")


def test_an_unknown_protection_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'raid' is not a protection scheme; use none, arc:k .*aec2"
    ):
        load_job(write(tmp_path, changed("snapshot.protection", "raid")))
    with pytest.raises(ConfigurationError, match=r"snapshot.every_steps.*1 or more"):
        load_job(write(tmp_path, changed("snapshot.every_steps", -1)))
    with pytest.raises(
        ConfigurationError, match=r'checkpoint.every_steps.*write every_steps = "auto" or a number'
    ) as caught:
        load_job(write(tmp_path, changed("checkpoint.url", "kept")))
    assert "not allowed" not in str(caught.value), "the user did not write 0"


CHECKPOINTS = {"snapshot": {"every_steps": 5}, "checkpoint": {"url": "kept", "every_steps": 10}}
EXPORTS = {"huggingface_every_steps": 20, "huggingface_directory": "exports"}


def test_paths_of_exports_are_relative_to_the_job_file(tmp_path: Path) -> None:
    table = CHECKPOINTS["checkpoint"] | EXPORTS
    policy = load_job(write(tmp_path, GOOD | CHECKPOINTS | {"checkpoint": table})).checkpoint
    assert policy.huggingface_directory == str(tmp_path / "exports")
    assert (policy.url, policy.huggingface_every_steps) == (str(tmp_path / "kept"), 20)


def test_paths_of_all_tables_may_begin_with_the_home_directory_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    (home / "train.py").write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SCRATCH", str(scratch))
    table = (
        CHECKPOINTS["checkpoint"] | EXPORTS | {"url": "~/kept", "huggingface_directory": "$SCRATCH/exports"}
    )
    logging = {"directory": "~/logs", "tensorboard": "$SCRATCH/runs", "mlflow": {"tracking_uri": "~/mlruns"}}
    tables = GOOD | CHECKPOINTS | {"checkpoint": table, "logging": logging}
    tables["training"] = GOOD["training"] | {"function": "~/train.py:build"}
    job = load_job(write(tmp_path, tables))
    assert job.training["function"] == f"{home}/train.py:build"
    assert job.checkpoint.url == str(home / "kept")
    assert job.checkpoint.huggingface_directory == str(scratch / "exports")
    assert (job.logging.directory, job.logging.tensorboard) == (str(home / "logs"), str(scratch / "runs"))
    assert job.logging.mlflow is not None and job.logging.mlflow.tracking_uri == str(home / "mlruns")


def test_a_script_that_cannot_be_looked_up_is_an_error_of_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"training\.function: .*cannot be read: File name too long"):
        load_job(write(tmp_path, changed("training.function", f"{'x' * 300}.py:build")))


def test_variables_that_are_not_set_are_errors_of_the_job_file(tmp_path: Path) -> None:
    table = CHECKPOINTS["checkpoint"] | {"url": "$FTD_NOT_SET/kept"}
    tables = GOOD | CHECKPOINTS | {"checkpoint": table, "logging": {"tensorboard": "$FTD_NOT_SET/runs"}}
    tables["planner"] = {"profile": "$FTD_NOT_SET/profile.json"}
    with pytest.raises(ConfigurationError) as caught:
        load_job(write(tmp_path, tables))
    places = [(error.field or "").partition(": ")[2] for error in caught.value.errors]
    assert places == ["planner.profile", "checkpoint.url", "logging.tensorboard"]


def test_an_interval_of_checkpoints_is_a_number_or_chosen(tmp_path: Path) -> None:
    policies = [
        load_job(write(tmp_path, GOOD | CHECKPOINTS | {"checkpoint": {"url": "kept", "every_steps": every}}))
        for every in (10, "auto")
    ]
    chosen = [(job.checkpoint.every_steps, job.checkpoint.auto_interval) for job in policies]
    assert chosen == [(10, False), (1, True)]
    for every in (-1, "often"):
        table = {"url": "kept", "every_steps": every}
        with pytest.raises(ConfigurationError, match=r"checkpoint.every_steps"):
            load_job(write(tmp_path, GOOD | CHECKPOINTS | {"checkpoint": table}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"huggingface_every_steps": 0}, "huggingface_every_steps: the export interval is missing"),
        ({"huggingface_every_steps": -1}, "huggingface_every_steps: -1 is not allowed"),
        ({"huggingface_directory": ""}, "huggingface_directory: exports need a directory"),
        (
            {"huggingface_directory": "s3://b/x"},
            "huggingface_directory: exports cannot be written to s3://b/x",
        ),
        ({"huggingface_directory": "kept"}, "exports cannot be written to .*kept .*a separate directory"),
        ({"url": "file:///c", "huggingface_directory": "/c/"}, "exports cannot be written to /c"),
        ({"url": "", "every_steps": 0}, "checkpoint.url: exports are made from checkpoints"),
    ],
)
def test_impossible_exports_are_rejected(tmp_path: Path, change: dict[str, object], says: str) -> None:
    table = CHECKPOINTS["checkpoint"] | EXPORTS | change
    with pytest.raises(ConfigurationError, match=says):
        load_job(write(tmp_path, GOOD | CHECKPOINTS | {"checkpoint": table}))


@pytest.mark.parametrize("protection", [None, "none", "aor", "aor+arc:1", "arc:1+aor"])
def test_protections_of_sharded_optimizer_state(tmp_path: Path, protection: str | None) -> None:
    tables = changed("training.zero1", True)
    if protection is not None:
        tables["snapshot"] = {"protection": protection}
    job = load_job(write(tmp_path, tables))
    assert job.policy.zero1 and job.training["zero1"] is True
    assert job.snapshot.protection == (protection or "aor")


@pytest.mark.parametrize(
    ("zero1", "protection", "says"),
    [
        (True, "aec", "aec protects state that all owners hold.*write aor"),
        (True, "aec2+aor", "aec2 protects state that all owners hold.*write aor"),
        (True, "arc:1", "copies parts that an owner does not have.*write arc:1.aor"),
        (True, "arc:2+aor", "copies parts that an owner does not have.*write arc:1.aor"),
        (False, "aor", "replicas of the parts of ZeRO-1.*training.zero1 = true"),
        (False, "aec+aor", "replicas of the parts of ZeRO-1.*training.zero1 = true"),
    ],
)
def test_protections_that_do_not_suit_the_sharding_are_rejected(
    tmp_path: Path, zero1: bool, protection: str, says: str
) -> None:
    tables = changed("training.zero1", zero1) | {"snapshot": {"protection": protection}}
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_job(write(tmp_path, tables))
    assert caught.value.field == "job.toml: snapshot.protection"
    data = load_job_data(write(tmp_path, changed("training.zero1", zero1)))
    other = msgspec.structs.replace(data, snapshot=SnapshotData(protection=protection))
    with pytest.raises(ConfigurationError, match=says):
        job_from_data(other, job_id="j", devices_per_node=1)


def test_logging_is_off_by_default(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, GOOD)).logging == LoggingPolicy()


def test_logging_paths_become_absolute(tmp_path: Path) -> None:
    tables = GOOD | {"logging": {"tensorboard": "runs", "wandb": {"mode": "offline"}, "mlflow": {}}}
    logging = load_job(write(tmp_path, tables)).logging
    name = GOOD["name"]
    assert logging == LoggingPolicy(
        directory=str(tmp_path / "runs"),
        tensorboard=str(tmp_path / "runs"),
        wandb=WandbPolicy(project=name, mode="offline"),
        mlflow=MlflowPolicy(tracking_uri=str(tmp_path / "runs" / "mlruns"), experiment=name),
    )
    assert sinks_of(logging) == ("tensorboard", "mlflow", "wandb")
    tables = GOOD | {"logging": {"directory": "kept", "mlflow": {"tracking_uri": "http://10.0.0.1:5000"}}}
    logging = load_job(write(tmp_path, tables)).logging
    assert (logging.directory, sinks_of(logging)) == (str(tmp_path / "kept"), ("mlflow",))
    assert logging.mlflow is not None and logging.mlflow.tracking_uri == "http://10.0.0.1:5000"
    only = load_job(write(tmp_path, GOOD | {"logging": {"wandb": {"project": "p", "tags": ["a"]}}})).logging
    assert only.directory == str(tmp_path / "logs")
    assert only.wandb == WandbPolicy(project="p", tags=("a",))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"wandb": {"mode": "disabled"}}, "logging.wandb.mode.*'online'.*'offline'|offline"),
        ({"tensorbord": "runs"}, "tensorbord.*did you mean 'tensorboard'"),
        ({"tensorboard": True}, "logging.tensorboard.*text in quotes"),
    ],
)
def test_errors_in_logging_are_named(tmp_path: Path, table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_job(write(tmp_path, GOOD | {"logging": table}))


def test_a_submitted_job_with_a_relative_path_is_rejected(tmp_path: Path) -> None:
    data = load_job_data(write(tmp_path, GOOD))
    other = msgspec.structs.replace(data, logging=LoggingData(directory="logs"))
    with pytest.raises(ConfigurationError, match="'logs' is not an absolute path"):
        job_from_data(other, job_id="j", devices_per_node=1)


def test_a_submitted_job_may_omit_the_same_keys_as_a_job_file(tmp_path: Path) -> None:
    data = load_job_data(write(tmp_path, GOOD | {"training": GOOD["training"] | {"zero1": True}}))
    sinks = LoggingData(directory="/kept", wandb=WandbData(), mlflow=MlflowData())
    other = msgspec.structs.replace(data, logging=sinks, snapshot=SnapshotData(every_steps=5))
    job = job_from_data(other, job_id="j", devices_per_node=1)
    assert job.logging.wandb == WandbPolicy(project="gpt")
    assert job.logging.mlflow == MlflowPolicy(tracking_uri="/kept/mlruns", experiment="gpt")
    assert job.snapshot.protection == "aor"


def test_a_coordinator_rejects_a_sink_without_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = LoggingPolicy(directory="/logs", tensorboard="/logs", wandb=WandbPolicy(project="p"))
    check_installed(policy)
    monkeypatch.setitem(tracking._PACKAGES, "wandb", ("not-to-be-found",))
    with pytest.raises(ConfigurationError, match=r"not-to-be-found is not installed.*pip install") as caught:
        check_installed(policy)
    assert caught.value.field == "logging.wandb"
