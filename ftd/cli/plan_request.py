"""Turns the options and files of ``ftd plan`` into a profile, a policy and a number of nodes."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from msgspec.structs import replace as changed

from ftd.cli.options import parse_size
from ftd.errors import ConfigurationError
from planner.values import ActivationCheckpointing, Objective, PlannerOptions, Policy

if TYPE_CHECKING:
    from ftd.snapshots.protection import SnapshotProtection
    from planner.errors import PlanningError
    from planner.preview import Preview
    from planner.values import ModelProfile
    from statemachine.messages.values import Job

MAX_NODES = 100_000
MAX_MICROBATCHES = 10_000_000
MICROBATCHES_PER_DEVICE = 4
"""Default of ``--microbatches``: the paper's N_b = 4S (Oobleck §4.1.2) with one stage per device."""
MAX_TABLE_CELLS = 1 << 28
"""Limit of the planner's tables of stage times: (devices + 1)·(layers + 1)² numbers each, 2 GiB for one table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Command line as given; ``None`` for options that were not given."""

    job: Path | None = None
    profile: Path | None = None
    nodes: int
    devices_per_node: int = 1
    template_nodes: int | None = None
    microbatches: int | None = None
    tolerate: int | None = None
    memory: str | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    protection: str | None = None
    planner: dict[str, Any] = field(default_factory=dict)
    """Keys of ``[planner]`` (``planner.values.PlannerOptions``) that were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Input of the planner, and the options in which its errors are explained."""

    options: PlanOptions
    name: str
    """Name of the job or of the profile's file."""
    profile: "ModelProfile"
    policy: Policy
    protection: str | None = None
    """Scheme of the snapshots (``storage.codes``) or auto; ``None`` if there are no snapshots and no option asks
    for one.
    """
    zero1: bool = False

    def other_objective(self) -> "PlanRequest":
        """Return the same request with the other objective."""
        other: Objective = "iteration" if self.policy.objective == "paper" else "paper"
        return replace(self, policy=changed(self.policy, objective=other))

    def preview(self) -> "Preview":
        """Return the planner's result.

        :raises ConfigurationError: planning is impossible; the error names the option and what would work.
        """
        from planner.errors import PlanningError
        from planner.preview import preview

        self._check()
        options = self.options
        try:
            seen = preview(self.profile, self.policy, options.nodes, options.template_nodes)
        except PlanningError as error:
            raise self._explained(error) from None
        if not 0 <= seen.instantiation.iteration_ms < float("inf"):
            raise ConfigurationError(
                "the times of the layers are too large to add up",
                field=self.name,
                remedy="check the units of the profile: times are in milliseconds",
            )
        return seen

    def snapshot_protection(self, seen: "Preview") -> "SnapshotProtection | None":
        """Return the protection of snapshots on the pipelines that ``preview`` chose; ``None`` if there are no
        snapshots.

        :raises ConfigurationError: the scheme does not work with this number of owners.
        """
        if self.protection is None:
            return None
        from ftd.snapshots.protection import describe_protection

        layers = self.profile.layers
        try:
            if self.protection != "auto":
                return describe_protection(seen, layers, self.protection)
            from ftd.coordinator.protection_choice import choose_scheme

            choice = choose_scheme(
                len(seen.instantiation.sizes),
                self.policy.tolerate,
                zero1=self.zero1,
                fullest_bytes=lambda scheme: describe_protection(seen, layers, scheme).node_bytes,
                limit_bytes=None,
                nodes=seen.nodes,
            )
            return replace(describe_protection(seen, layers, choice.scheme), reason=choice.reason)
        except ValueError as error:
            raise ConfigurationError(
                str(error),
                field="snapshot.protection" if self.options.protection is None else "--protection",
                remedy="give another scheme with --protection, or --protection none to plan without it",
            ) from None

    def _check(self) -> None:
        """Report problems in the words of the command line, before the planner reports them in its own."""
        options, policy = self.options, self.policy
        pipelines = policy.tolerate + 1
        if pipelines > options.nodes and options.tolerate is not None:
            raise ConfigurationError(
                f"tolerating {policy.tolerate} failures takes {pipelines} pipelines of at least one node, but "
                f"there are only {options.nodes} nodes",
                field="--tolerate",
                remedy=f"write at most {options.nodes - 1}, or --nodes {pipelines}",
            )
        if pipelines > policy.microbatches and (options.job is None or options.microbatches is not None):
            raise ConfigurationError(
                f"{policy.microbatches} cannot be distributed over {pipelines} pipelines, which tolerating "
                f"{policy.tolerate} failures takes",
                field="--microbatches",
                remedy=f"write {pipelines} or more",
            )
        if options.template_nodes is not None and options.template_nodes > options.nodes:
            raise ConfigurationError(
                f"there are only {options.nodes} nodes, and no template has more than these",
                field="--template-nodes",
                remedy=f"write at most {options.nodes}",
            )
        layers = len(self.profile.layers)
        cells = (policy.devices_per_node + 1) * (layers + 1) ** 2
        if cells > MAX_TABLE_CELLS:
            most = int((MAX_TABLE_CELLS / (policy.devices_per_node + 1)) ** 0.5) - 1
            raise ConfigurationError(
                f"{layers} layers are too many for {policy.devices_per_node} devices per node",
                field=self.name,
                remedy=f"measure several layers as one, so that there are at most {most}",
            )

    def _explained(self, error: "PlanningError") -> ConfigurationError:
        """Return the planner's error with the names of the command line in place of the planner's settings."""
        message = str(error)
        for setting, option in _OPTIONS.items():
            message = message.replace(setting, option)
        if self.options.job is None or self.options.tolerate is not None:
            message = message.replace("tolerance.failures =", "--tolerate").replace(
                "tolerance.failures to", "--tolerate to"
            )
        return ConfigurationError(message.replace("profile.layers", "layers"), field=self.name)


_OPTIONS = {
    "policy.devices_per_node": "--gpus-per-node",
    "policy.tolerate": "--tolerate",
    "policy.device_memory_bytes": "--memory",
    "activation_checkpointing =": "--activation-checkpointing",
    **{f"{key} =": f"--{key.replace('_', '-')}" for key in PlannerOptions.__struct_fields__},
}


def build_plan_request(options: PlanOptions) -> PlanRequest:
    """Read the files; measure the model if a job but no profile is given.

    :raises ConfigurationError: a value is wrong; the error names the option or the field, and what would
        work.
    """
    from ftd.config.job import job_from_data, load_job_data, profile_from_data

    if options.job is None and options.profile is None:
        raise ConfigurationError(
            "there is neither a profile nor a job to plan for",
            field="--profile",
            remedy="give --profile FILE (no cluster needed), or a JOB.toml, whose model is then measured",
        )
    memory_bytes = None if options.memory is None else parse_size(options.memory, "--memory")
    protection = _checked_scheme(options.protection)
    job = known = None
    zero1 = False
    if options.job is not None:
        data = load_job_data(options.job)
        job = job_from_data(data, job_id=data.name, devices_per_node=options.devices_per_node)
        known = profile_from_data(data)
        zero1 = job.policy.zero1
        if protection is None and job.snapshot.every_steps:
            protection = "auto" if job.snapshot.auto_protection else job.snapshot.protection
    profile = _profile(options, job, known)
    policy = _policy_of_job(job, options) if job is not None else _policy_alone(profile, options)
    given = {
        "tolerate": options.tolerate,
        "device_memory_bytes": memory_bytes,
        "activation_checkpointing": options.activation_checkpointing,
        **options.planner,
    }
    policy = changed(policy, **{name: value for name, value in given.items() if value is not None})
    file = options.job or options.profile
    assert file is not None, "one of the two was given"
    name = job.name if job is not None else file.name
    return PlanRequest(
        options=options, name=name, profile=profile, policy=policy, protection=protection, zero1=zero1
    )


def _checked_scheme(scheme: str | None) -> str | None:
    """Return the scheme if it exists.

    :raises ConfigurationError: there is no such protection.
    """
    if scheme is not None and scheme != "auto":
        from storage.codes import parse_scheme

        try:
            parse_scheme(scheme)
        except ValueError as error:
            raise ConfigurationError(
                str(error), field="--protection", remedy="write one of these, or auto"
            ) from None
    return scheme


def _profile(options: PlanOptions, job: "Job | None", known: "ModelProfile | None") -> "ModelProfile":
    """Return the profile to plan with.

    :param known: the profile that the job file names.
    """
    if options.profile is not None:
        from ftd.config.profile_file import load_profile

        return load_profile(options.profile)
    if known is not None:
        return known
    assert job is not None, "one of the two was given"
    from ftd.cli.profiling.layers import measure_layers
    from ftd.observe.view.progress import delayed_progress

    with delayed_progress("measuring layers") as on_progress:
        way = options.activation_checkpointing or job.policy.activation_checkpointing
        return asyncio.run(measure_layers(job, on_progress, activation_checkpointing=way)).profile


def _policy_of_job(job: "Job", options: PlanOptions) -> Policy:
    if options.microbatches is None:
        return job.policy
    return changed(job.policy, global_batch=options.microbatches * job.policy.microbatch_rows)


def _policy_alone(profile: "ModelProfile", options: PlanOptions) -> Policy:
    """Return the policy without a job: microbatches as they were measured, and no failures to tolerate."""
    microbatches = options.microbatches
    if microbatches is None:
        microbatches = MICROBATCHES_PER_DEVICE * options.nodes * options.devices_per_node
    return Policy(
        devices_per_node=options.devices_per_node,
        tolerate=0,
        global_batch=microbatches * profile.microbatch_rows,
        microbatch_rows=profile.microbatch_rows,
        **asdict(PlannerOptions()),
    )
