"""Sources of the job of a replay: a model card, a measured profile, or a job file."""

from dataclasses import replace
from pathlib import Path

from msgspec.structs import asdict
from msgspec.structs import replace as changed

from ftd.config.job import job_from_data, load_job_data, profile_from_data
from ftd.config.profile_file import load_profile
from ftd.errors import ConfigurationError
from ftd.replay.cards import card_names, read_card
from ftd.replay.job import JobError, ReplayJob
from planner.errors import PlanningError
from planner.values import ActivationCheckpointing, ModelProfile, PlannerOptions, Policy


def load_replay_job(
    spec: str | Path,
    nodes: int,
    *,
    profile: Path | None = None,
    global_batch: int | None = None,
    tolerate: int | None = None,
    devices_per_node: int | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
) -> ReplayJob:
    """Return the job to replay, checked for a cluster of at most ``nodes`` nodes.

    :param spec: the name of a model card, a profile of ``ftd profile`` (``.json``), or a job file (``.toml``).
    :param profile: the measured profile of a job file that names none.
    :param global_batch: samples of a step; a profile needs it, and it replaces that of a card or job file, as the
        other options do.
    :raises JobError: the job cannot be planned on so many nodes; the message says what would work.
    :raises ConfigurationError: a file is wrong, or an option is missing.
    """
    if isinstance(spec, str) and spec in card_names():
        _reject_profile(profile, f"the model card {spec} has its own")
        job = read_card(spec)
    elif Path(spec).suffix == ".json":
        _reject_profile(profile, f"{spec} is one already")
        job = _job_of_profile(Path(spec), global_batch)
    elif Path(spec).suffix == ".toml":
        job = _job_of_file(Path(spec), profile, devices_per_node or 1)
    else:
        raise ConfigurationError(
            f"{spec} is neither a model card nor a profile (.json) nor a job file (.toml)",
            field="JOB",
            remedy=f"the model cards are {', '.join(card_names())}",
        )
    given = {
        "global_batch": global_batch,
        "tolerate": tolerate,
        "devices_per_node": devices_per_node,
        "activation_checkpointing": activation_checkpointing,
    }
    policy = changed(job.policy, **{key: value for key, value in given.items() if value is not None})
    # What is published holds for the published batch alone.
    published = job.published if policy.global_batch == job.policy.global_batch else {}
    job = replace(job, policy=policy, published=published)
    of_option = tolerate is not None or Path(spec).suffix != ".toml"
    _check(job, nodes, tolerance="--tolerate" if of_option else "tolerance.failures")
    return job


def _reject_profile(profile: Path | None, why: str) -> None:
    if profile is not None:
        raise ConfigurationError(
            f"a profile is not needed: {why}", field="--profile", remedy="leave the option out"
        )


def _job_of_profile(path: Path, global_batch: int | None) -> ReplayJob:
    profile = load_profile(path)
    if global_batch is None:
        raise ConfigurationError(
            f"{path.name} is a profile, which does not say how many samples a step has",
            field="--global-batch",
            remedy=f"write a multiple of the microbatch of {profile.microbatch_rows} rows that was measured",
        )
    return ReplayJob(
        name=path.stem,
        source=f"measured profile {path.name}",
        profile=profile,
        policy=Policy(
            tolerate=0,
            global_batch=global_batch,
            microbatch_rows=profile.microbatch_rows,
            **asdict(PlannerOptions()),
        ),
    )


def _job_of_file(path: Path, given: Path | None, devices_per_node: int) -> ReplayJob:
    data = load_job_data(path)
    job = job_from_data(data, job_id=data.name, devices_per_node=devices_per_node)
    found: ModelProfile | None = load_profile(given) if given is not None else profile_from_data(data)
    if found is None:
        raise ConfigurationError(
            f"the layers of {path.name} have not been measured, and a replay does not run the model",
            field="--profile",
            remedy=f"measure them with ftd profile {path} --output profile.json, and add --profile profile.json",
        )
    measured = f"profile {given.name}" if given is not None else "its own profile"
    return ReplayJob(
        name=job.name, source=f"job file {path.name} with {measured}", profile=found, policy=job.policy
    )


def _check(job: ReplayJob, nodes: int, *, tolerance: str) -> None:
    """Plan once, so that a job that cannot run is rejected before the replay.

    :param tolerance: option or key by which the number of tolerated failures is changed.
    :raises JobError: it cannot.
    """
    needed = job.planner.fewest_nodes
    if nodes < needed:
        raise JobError(
            f"{job.name} needs at least {needed} nodes, but there are never more than {nodes}",
            remedy="give a trace with more nodes, devices with more memory, or a smaller model",
        )
    job.prepare(nodes)
    try:
        job.planner.check_tolerance(nodes)
        job.iteration_s(nodes)
    except PlanningError as error:
        problem = str(error).replace("tolerance.failures", tolerance).replace("--tolerate =", "--tolerate")
        raise JobError(f"{job.name} cannot be planned for {nodes} nodes: {problem}") from error
