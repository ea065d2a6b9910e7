"""Reads and checks job files: what to train, with which batches, and how many failures to survive.

This happens on the user's machine before anything is sent. The coordinator answers what only the cluster can
know, for example whether the model is valid and whether there are enough nodes. Every trainer reads the training
script under the same absolute path, so it must be there on every host.
"""

import math
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ftd.config.checkpoints import check_checkpoint, checkpoint_policy, with_absolute_paths
from ftd.config.data import check_evaluation, resolve_data, resolve_evaluation
from ftd.config.error_collector import ErrorCollector
from ftd.config.models import resolve_model
from ftd.config.optimization import check_optimizer, check_schedule
from ftd.config.profile_file import load_profile
from ftd.config.snapshots import check_snapshot, protection_or_default, snapshot_policy
from ftd.config.tracking import logging_policy, resolve_logging
from ftd.config.validation import (
    convert,
    expand_path,
    input_path,
    keep_valid_fields,
    read_toml,
    require_memory,
    require_name,
    require_positive,
    single_values,
)
from ftd.errors import ConfigurationError, IncompleteError
from ftd.transport.wire.public import (
    CheckpointData,
    JobData,
    LoggingData,
    PolicyData,
    SnapshotData,
    encode_json,
)
from planner.errors import BatchError
from planner.pipelines.batch import check_batch
from planner.values import Minimum, ModelProfile, PlannerOptions, Policy
from runtime.import_conflicts import find_import_conflict
from runtime.sources.errors import DataError
from runtime.sources.used_files import count_files
from runtime.wire.recipe import (
    RECIPE,
    DataTable,
    EvaluationTable,
    FileTotals,
    ModelTable,
    NotNegative,
    OptimizerTable,
    Positive,
    Recipe,
    ScheduleTable,
    merge_tables,
)
from statemachine.messages.trainer import TrainingData, TrainingOptions
from statemachine.messages.values import Job, UpdatePolicy

DEFAULT_CLIP = 1.0
"""Gradient clipping of jobs with ``[model]``."""
_MIB = 1024 * 1024
_MAX_PROFILE_BYTES = 900_000
"""Limit that keeps a submitted job within one MQTT message; see ``codec.MAX_PAYLOAD_BYTES``."""


class TrainingTable(TrainingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[training]``: batches, and how they are computed."""

    function: Annotated[str | None, msgspec.Meta(examples=["train.py:build"])] = None
    """Training function: ``file.py:name``, relative to the job file, or ``package.module:name``. Leave it out
    with ``[model]``.
    """
    global_batch: int = 32
    """Samples per step over all nodes; it never changes while the job runs."""
    microbatch: int = 4
    """Samples that pass through a pipeline together; must divide ``global_batch``."""
    device_peak_tflops: Annotated[Positive | None, msgspec.Meta(examples=[989.0])] = None
    """Peak of one device in this precision in TFLOP/s, for MFU. Default: the known value of the CUDA device, if
    any.
    """
    clip_gradient_norm: Annotated[NotNegative | None, msgspec.Meta(examples=[1.0])] = None
    """Largest norm of all gradients together; 0: no limit. Default: 1.0 with ``[model]``, no limit with a
    function.
    """
    device: Annotated[Literal["cpu", "cuda"] | None, msgspec.Meta(examples=["cuda"])] = None
    """Kind of device to compute on. Default: ``cuda`` with nccl, otherwise ``cpu``."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the function: any values and tables."""


class ToleranceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[tolerance]``: how many failures the job survives without rolling back."""

    failures: int = 1
    """Nodes that may fail at the same time while one copy of every layer remains."""
    minimum: Minimum = "one_replica"
    """Condition for a pause: ``one_replica`` continues while one copy of every layer is left; ``oobleck``
    needs ``failures`` + 1 copies.
    """


class PlannerTable(PlannerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[planner]``: how layers are distributed over the nodes."""

    device_memory_mib: Annotated[float | None, msgspec.Meta(examples=[16384.0])] = None
    """Memory of one device to plan with, in MiB. Default: what the devices report."""
    horizon_s: Annotated[float | None, msgspec.Meta(examples=[3600.0])] = None
    """Expected time to the next failure in seconds. Default: learned from the job's failures."""
    profile: Annotated[str | None, msgspec.Meta(examples=["llama.profile.json"])] = None
    """Saved profile to plan with, relative to the job file. Default: a node measures the layers."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job: what to train, and for how many steps."""

    name: str
    """Name of the job: letters, digits, ``.``, ``_`` and ``-``."""
    steps: int
    """Number of optimizer steps to train."""
    model: ModelTable | None = None
    data: DataTable = DataTable()
    training: TrainingTable = TrainingTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    evaluation: EvaluationTable = EvaluationTable()
    tolerance: ToleranceTable = ToleranceTable()
    planner: PlannerTable = PlannerTable()
    snapshot: SnapshotData = SnapshotData()
    checkpoint: CheckpointData = CheckpointData()
    logging: LoggingData = LoggingData()


def load_job_data(
    path: Path,
    *,
    steps: int | None = None,
    override: dict[str, Any] | None = None,
    shown_as: str | None = None,
) -> JobData:
    """Read and check a job file.

    :param steps: replaces the number of steps in the file.
    :param override: tables and keys that replace those of the file.
    :param shown_as: name of the file in messages; by default its own name.
    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    if steps is not None:
        require_positive(steps, "--steps")
    collector = ErrorCollector(shown_as or path.name)
    valid = keep_valid_fields(merge_tables(read_toml(path), override or {}), JobFile, collector)
    try:
        file = msgspec.convert(valid, JobFile)
    except msgspec.ValidationError:  # Missing required keys have been collected.
        collector.raise_any()
        raise
    _check_values(file, collector)
    if steps is not None:
        file = msgspec.structs.replace(file, steps=steps)
    directory = path.resolve().parent
    function, arguments = _what_to_train(file, directory, collector)
    clip = file.training.clip_gradient_norm
    if clip is None and file.model is not None:
        clip = DEFAULT_CLIP
    training = TrainingData(
        function=function,
        path=str(directory),
        steps=file.steps,
        global_batch=file.training.global_batch,
        microbatch_rows=file.training.microbatch,
        clip_gradient_norm=clip or None,
        device_peak_tflops=file.training.device_peak_tflops or 0.0,
        data_workers=file.data.workers,
        evaluation_every_steps=file.evaluation.every_steps,
        evaluation_batches=file.evaluation.batches,
        device=file.training.device or ("cuda" if file.training.backend == "nccl" else "cpu"),
        within_node=file.planner.within_node,
        arguments=arguments,
        **_values(file.training, TrainingOptions),
    )
    memory_mib = file.planner.device_memory_mib
    named = file.planner.profile
    profile = (
        None if named is None else collector.value_or(lambda: _submitted_profile(named, directory), None)
    )
    checkpoint = collector.value_or(lambda: with_absolute_paths(file.checkpoint, directory), file.checkpoint)
    logging = collector.value_or(lambda: resolve_logging(file.logging, directory, file.name), file.logging)
    collector.raise_any()
    return JobData(
        name=file.name,
        steps=file.steps,
        policy=PolicyData(
            global_batch=file.training.global_batch,
            microbatch_rows=file.training.microbatch,
            tolerate=file.tolerance.failures,
            minimum=file.tolerance.minimum,
            activation_checkpointing=file.training.activation_checkpointing,
            device_memory_bytes=None if memory_mib is None else int(memory_mib * _MIB),
            **_values(file.planner, PlannerOptions),
        ),
        training=msgspec.to_builtins(training),
        horizon_s=file.planner.horizon_s,
        snapshot=msgspec.structs.replace(
            file.snapshot,
            protection=protection_or_default(file.snapshot.protection, zero1=file.training.zero1),
        ),
        checkpoint=checkpoint,
        logging=logging,
        profile=profile,
    )


def _values(table: msgspec.Struct, shared: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values of the keys that a table inherits from ``shared``."""
    return {key: getattr(table, key) for key in shared.__struct_fields__}


def _what_to_train(file: JobFile, directory: Path, collector: ErrorCollector) -> tuple[str, dict[str, Any]]:
    """Return the training function and its arguments: the user's, or ours that builds a Hugging Face model."""
    if file.model is None:
        _reject_tables_of_model(file, collector)
        return collector.value_or(
            lambda: _function(file.training.function, directory), ""
        ), file.training.arguments
    for key, value in (("function", file.training.function), ("arguments", file.training.arguments or None)):
        if value is not None:
            collector.reject(
                "[model] already says what to train",
                field=f"training.{key}",
                remedy=f"remove {key} or the table [model]",
            )
    model = resolve_model(file.model, directory, collector)
    recipe = Recipe(
        model=model,
        data=resolve_data(file.data, model, directory, collector),
        optimizer=file.optimizer,
        schedule=file.schedule,
        evaluation=resolve_evaluation(file.evaluation, model, directory, collector),
        steps=file.steps,
    )
    if not collector.errors:
        with collector.collect():
            recipe = msgspec.structs.replace(recipe, files=_facts_of(recipe))
    arguments: dict[str, Any] = msgspec.to_builtins(recipe)
    return RECIPE, arguments


def _facts_of(recipe: Recipe) -> dict[str, FileTotals]:
    """Return sizes and counts of the recipe's files, so that every node can check its own.

    :raises ConfigurationError: a file has disappeared.
    """
    try:
        return count_files(recipe)
    except DataError as error:
        raise ConfigurationError(str(error)) from None


def _reject_tables_of_model(file: JobFile, collector: ErrorCollector) -> None:
    """Collect errors for tables that only apply with ``[model]``; otherwise the training function decides."""
    workers = DataTable(workers=file.data.workers)
    when = EvaluationTable(every_steps=file.evaluation.every_steps, batches=file.evaluation.batches)
    for name, table, allowed, keys in (
        ("data", file.data, workers, "workers"),
        ("optimizer", file.optimizer, OptimizerTable(), ""),
        ("schedule", file.schedule, ScheduleTable(), ""),
        ("evaluation", file.evaluation, when, "every_steps and batches"),
    ):
        if table != allowed:
            instead = f"with training.function, only {keys} may be set" if keys else "remove the table"
            collector.reject(
                "the training function decides this",
                field=name,
                remedy=f"{instead}; or write [model] instead of training.function",
            )


def job_from_data(data: JobData, *, job_id: str, devices_per_node: int) -> Job:
    """Return a submitted job in the form that the machines use, checked again because anybody may publish a
    request.

    :raises ConfigurationError: see ``load_job_data``; covers everything that can be checked without the
        user's files.
    """
    training = convert(data.training, TrainingData, where="training")
    require_name(data.name, "name")
    require_positive(data.steps, "steps")
    _check_batch(data.policy.global_batch, data.policy.microbatch_rows)
    _check_tolerance(data.policy.tolerate)
    agreed = (training.steps, training.global_batch, training.microbatch_rows)
    if agreed != (data.steps, data.policy.global_batch, data.policy.microbatch_rows):
        raise ConfigurationError(
            "training and policy have different steps or batches", field="training", remedy="make them equal"
        )
    for key in ("activation_checkpointing", "within_node"):
        if (ours := getattr(training, key)) != (planned := getattr(data.policy, key)):
            raise ConfigurationError(
                f"training has {ours}, but policy has {planned}",
                field=f"training.{key}",
                remedy="make them equal",
            )
    require_positive(devices_per_node, "policy.devices_per_node")
    if data.horizon_s is not None:
        require_positive(data.horizon_s, "planner.horizon_s")
    snapshot = snapshot_policy(data.snapshot, zero1=training.zero1)
    return Job(
        job_id=job_id,
        name=data.name,
        steps=data.steps,
        policy=Policy(
            **msgspec.structs.asdict(data.policy)
            | {"devices_per_node": devices_per_node, "zero1": training.zero1}
        ),
        training={
            **data.training,
            "profile_given": data.profile is not None,
            # A node with one device has no choice: its trainer holds whole layers.
            "within_node": training.within_node if devices_per_node > 1 else "replicate",
        },
        horizon_s=data.horizon_s,
        snapshot=snapshot,
        checkpoint=checkpoint_policy(data.checkpoint, snapshot),
        logging=logging_policy(data.logging, data.name),
        updates=update_policy(training, snapshots=data.snapshot.every_steps != 0),
        compare_replicas_every=training.compare_replicas_every,
    )


def profile_from_data(data: JobData) -> ModelProfile | None:
    """Return the profile that was submitted with a job, or ``None`` if the layers must be measured.

    The planner checks whether its numbers make sense.

    :raises ConfigurationError: it is not a profile.
    """
    return None if data.profile is None else convert(data.profile, ModelProfile, where="planner.profile")


def load_job(path: Path, *, devices_per_node: int = 1, steps: int | None = None) -> Job:
    """Return a job file as a ``Job``, without a coordinator (for ``ftd plan`` and tests).

    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    data = load_job_data(path, steps=steps)
    job_id = f"{data.name}-{uuid.uuid4().hex[:8]}"
    return job_from_data(data, job_id=job_id, devices_per_node=devices_per_node)


def _check_values(file: JobFile, collector: ErrorCollector) -> None:
    with collector.collect():
        require_name(file.name, "name")
    with collector.collect():
        _check_tolerance(file.tolerance.failures)
    if not 0 <= file.training.seed < 2**63:
        collector.reject(
            f"{file.training.seed} is not allowed",
            field="training.seed",
            remedy="write a number from 0 to 2^63 - 1",
        )
    if file.training.backend == "nccl" and file.training.device == "cpu":
        collector.reject(
            '"cpu" does not work with backend = "nccl"',
            field="training.device",
            remedy='remove device, or write backend = "gloo"',
        )
    for field, number, require in (
        ("steps", file.steps, require_positive),
        ("training.global_batch", file.training.global_batch, require_positive),
        ("training.microbatch", file.training.microbatch, require_positive),
        ("planner.device_memory_mib", file.planner.device_memory_mib, require_memory),
        ("planner.horizon_s", file.planner.horizon_s, require_positive),
    ):
        if number is not None:
            with collector.collect():
                require(number, field)
    if file.training.global_batch > 0 and file.training.microbatch > 0:
        with collector.collect():
            _check_batch(file.training.global_batch, file.training.microbatch)
    for field, table in (
        ("training.arguments", file.training.arguments),
        ("model.overrides", file.model.overrides if file.model is not None else {}),
    ):
        for place, value in single_values(table, field):
            if isinstance(value, float) and not math.isfinite(value):  # It would arrive as null.
                collector.reject(
                    "messages carry no number that is not finite", field=place, remedy="write a finite number"
                )
    with collector.collect():
        update_policy(file.training, snapshots=file.snapshot.every_steps != 0)
    with collector.collect():
        check_evaluation(file.evaluation)
    if file.model is not None:
        shard = file.planner.within_node in ("shard", "tensor")
        check_optimizer(file.optimizer, zero1=file.training.zero1, shard=shard, collector=collector)
        check_schedule(file.schedule, steps=file.steps, collector=collector)
    with collector.collect():
        check_snapshot(file.snapshot, zero1=file.training.zero1)
    with collector.collect():
        check_checkpoint(file.checkpoint, snapshots=file.snapshot.every_steps != 0)


def update_policy(options: TrainingOptions, *, snapshots: bool) -> UpdatePolicy:
    """Return the part of ``[training]`` that the coordinator uses.

    :param snapshots: the job takes snapshots.
    :raises ConfigurationError: one of these keys has a value that is not allowed.
    """
    policy = UpdatePolicy(**_values(options, UpdatePolicy))
    if policy.max_skipped < 0:
        raise ConfigurationError(
            f"{policy.max_skipped} updates cannot be skipped",
            field="training.max_skipped",
            remedy="write a positive number, or 0 if the job must never fail for skipped updates",
        )
    if not 0 < policy.spike_deviations < float("inf"):
        raise ConfigurationError(
            f"{policy.spike_deviations} deviations are no distance",
            field="training.spike_deviations",
            remedy="write a positive number",
        )
    if policy.spike_window < 3:
        raise ConfigurationError(
            f"{policy.spike_window} losses are too few to compare with",
            field="training.spike_window",
            remedy="write a number from 3",
        )
    if policy.on_spike == "skip" and not snapshots:
        raise ConfigurationError(
            '"skip" returns to a snapshot, and the job takes none',
            field="training.on_spike",
            remedy='set snapshot.every_steps, or write on_spike = "continue"',
        )
    return policy


def _submitted_profile(written: str, directory: Path) -> dict[str, Any]:
    """Return the profile in a file as it is sent with a job.

    :param directory: directory of the job file.
    :raises ConfigurationError: it cannot be read, or is too large to be submitted.
    """
    profile = load_profile(expand_path(written, directory, "planner.profile"))
    plain: dict[str, Any] = msgspec.to_builtins(profile)
    size = len(encode_json(plain))
    if size > _MAX_PROFILE_BYTES:
        raise ConfigurationError(
            f"the profile of {len(profile.layers)} layers takes {size} bytes, more than the {_MAX_PROFILE_BYTES} "
            "that can be submitted",
            field="planner.profile",
            remedy="remove the key, so that a node measures the layers",
        )
    return plain


def _check_batch(global_batch: int, microbatch: int) -> None:
    require_positive(global_batch, "training.global_batch")
    require_positive(microbatch, "training.microbatch")
    try:
        check_batch(global_batch, microbatch, pipelines=1)
    except BatchError as error:
        near = sorted(error.nearest, key=lambda batch: abs(batch - global_batch))
        raise ConfigurationError(
            f"{global_batch} samples cannot be divided into microbatches of {microbatch}",
            field="training.global_batch",
            remedy=f"write {' or '.join(map(str, near))}",
        ) from None


def _check_tolerance(failures: int) -> None:
    if failures < 0:
        raise ConfigurationError(
            f"{failures} is not allowed", field="tolerance.failures", remedy="write 0 or more"
        )


def _function(written: str | None, directory: Path) -> str:
    """Return the function, with an absolute path if it is in a file."""
    field = "training.function"
    if written is None:
        raise IncompleteError(
            "the job file does not say what to train",
            field=field,
            remedy='write function = "file.py:function" under [training], or add a table [model]',
        )
    place, colon, name = written.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigurationError(
            f"{written!r} does not name a function",
            field=field,
            remedy='write "file.py:function" or "package.module:function"',
        )
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise ConfigurationError(
                f"{place!r} is neither a .py file nor a module",
                field=field,
                remedy='write "file.py:function" or "package.module:function"',
            )
        _check_import_conflict(directory)
        return written
    script = input_path(place, directory, field).resolve()
    if not script.is_file():
        raise ConfigurationError(
            f"{script} does not exist", field=field, remedy="the path is relative to the job file"
        )
    _check_import_conflict(directory)
    _check_import_conflict(script.parent)
    return f"{script}:{name}"


def _check_import_conflict(directory: Path) -> None:
    """Check that a directory on the import path hides none of ftd's packages.

    :raises ConfigurationError: ``directory`` holds a module with the name of one of our packages.
    """
    if (conflict := find_import_conflict(directory)) is not None:
        path, name = conflict
        raise ConfigurationError(
            f"{path} would be imported instead of ftd's own package {name!r}",
            field="training.function",
            remedy=f"rename {path.name}, or move the training script to a separate directory",
        )
