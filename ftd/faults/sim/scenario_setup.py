"""The setup of a scenario in the simulator: a job, a stand-in for its model, nodes, and timing.

The stand-in consists of equal layers: as many as the faults name, but at least six. If the job limits a
device's memory, two nodes are needed for one replica of it, as in the examples.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from ftd.config.job import job_from_data, load_job_data, profile_from_data
from ftd.errors import ConfigurationError
from ftd.faults.chaos.values import AfterFault, CentralService, ClusterSetup, Fault, PlanRole, Scenario
from planner.values import LayerProfile, ModelProfile
from statemachine.messages.values import Job
from statemachine.timing import Timing

STEP_S = 0.1
LEAST_LAYERS = 6
_LAYER_BYTES = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSetup:
    """Cluster and job on which a scenario is played."""

    job: Job
    profile: ModelProfile
    nodes: tuple[str, ...]
    coordinators: tuple[str, ...]
    """The first one to start most likely leads; the others are standbys."""
    timing: Timing


def make_scenario_setup(
    scenario: Scenario, job: Path | None, nodes: int | None, origin: str
) -> ScenarioSetup:
    """Return the setup of the scenario's own ``[cluster]``, or of the arguments instead.

    :raises ConfigurationError: neither is given, or the job is not valid.
    """
    cluster = scenario.cluster
    if cluster is None:
        if job is None or nodes is None:
            raise ConfigurationError(
                "it has no [cluster] that says which job runs on how many nodes",
                field=origin,
                remedy="add one, or give --job and --nodes",
            )
        cluster = ClusterSetup(job=str(job), nodes=nodes)
    elif job is not None:  # The steps and overrides are those of another job.
        cluster = msgspec.structs.replace(cluster, job=str(job), steps=None, override={})
    data = load_job_data(Path(cluster.job), steps=cluster.steps, override=cluster.override)
    job_id, devices = f"{data.name}-simulated", cluster.devices_per_node
    made = job_from_data(data, job_id=job_id, devices_per_node=devices)
    profile = profile_from_data(data)
    if profile is None:
        profile = _stand_in(scenario, made)
        made = msgspec.structs.replace(
            made, policy=msgspec.structs.replace(made.policy, device_memory_bytes=None)
        )
    return ScenarioSetup(
        job=made,
        profile=profile,
        nodes=tuple(f"node-{number}" for number in range(cluster.nodes if nodes is None else nodes)),
        coordinators=tuple(f"coordinator-{number}" for number in range(cluster.coordinators)),
        timing=Timing(**cast(Any, cluster.timing)),
    )


def _stand_in(scenario: Scenario, job: Job) -> ModelProfile:
    named = [
        f.target.layer
        for f in scenario.faults
        if isinstance(f.target, PlanRole) and f.target.layer is not None
    ]
    count = max([LEAST_LAYERS, *(layer + 1 for layer in named)])
    layer = LayerProfile(
        forward_ms=10.0,
        backward_ms=20.0,
        parameter_bytes=_LAYER_BYTES // 4,
        gradient_bytes=_LAYER_BYTES // 4,
        optimizer_bytes=_LAYER_BYTES // 2,
        activation_bytes=100,
        output_bytes=100,
    )
    limited = job.policy.device_memory_bytes is not None
    return ModelProfile(
        layers=(layer,) * count,
        microbatch_rows=job.policy.microbatch_rows,
        device_memory_bytes=int(0.7 * _LAYER_BYTES * count) if limited else None,
    )


def _why_unsupported(fault: Fault, setting: ScenarioSetup) -> str:
    """Return why the simulator cannot inject this fault; empty if it can."""
    timing, devices = setting.timing, setting.job.policy.devices_per_node
    hung_s = 2 * max(timing.hang_floor_s, timing.hang_steps * STEP_S)
    short = fault.for_s is not None and fault.for_s < max(hung_s, timing.silence_s + 1.0)
    match fault.do:
        case "hang" if short and not isinstance(fault.target, CentralService):
            return "simulated trainers that sleep do not wake up again: it must last until they count as lost"
        case "slow" if fault.device is not None and devices > 1:
            return "a simulated node is slow with all of its trainers"
        case _:
            return ""


def unsupported_faults(scenario: Scenario, setting: ScenarioSetup) -> dict[Fault, str]:
    """Return the faults that the simulator does not support, with the reason."""
    found = {fault: _why_unsupported(fault, setting) for fault in scenario.faults}
    return {fault: why for fault, why in found.items() if why}


def without_faults(scenario: Scenario, skipped: Iterable[Fault]) -> Scenario:
    """Return the scenario without these faults and those that wait for them."""
    skipped_ids = {fault.id for fault in skipped}
    while more := {
        fault.id
        for fault in scenario.faults
        if fault.id not in skipped_ids
        and isinstance(fault.trigger, AfterFault)
        and fault.trigger.fault in skipped_ids
    }:
        skipped_ids |= more
    return replace(scenario, faults=tuple(fault for fault in scenario.faults if fault.id not in skipped_ids))
