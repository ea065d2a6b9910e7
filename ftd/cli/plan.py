"""``ftd plan``: what the planner would do with a job, without a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import JsonOption, print_json, print_rich
from ftd.errors import ConfigurationError, InternalError

if TYPE_CHECKING:
    from planner.values import ModelProfile, Plan, Template
    from statemachine.values import Job


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to plan for.")],
    devices_per_node: Annotated[int, typer.Option(min=1, help="Devices of each node.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Show the pipeline templates of a job and the pipelines chosen for a number of nodes.

    Builds the model once on this machine to measure its layers; nothing is trained.

    Example: ftd plan examples/gpt.toml --nodes 13
    """
    from ftd.config.job import load_job

    loaded = load_job(job, devices_per_node=devices_per_node)
    profile = profiled(loaded)
    templates, chosen = planned(loaded, profile, nodes)
    if as_json:
        print_json(_as_json(templates, chosen))
        return
    from ftd.view.plan import render_plan

    print_rich(render_plan(templates=templates, plan=chosen, profile=profile, policy=loaded.policy))


def profiled(job: "Job") -> "ModelProfile":
    """Measure the job's layers, in a process of its own: this one never loads torch.

    :raises ConfigurationError: the training function, or what it returns, cannot be used.
    """
    import subprocess
    import sys

    import msgspec

    from planner.values import ModelProfile
    from runtime.protocol import ProfileData

    done = subprocess.run(
        # Safe path: a planner.py in the current directory must not be imported for ours.
        [sys.executable, "-P", "-m", "runtime.profile"],
        input=msgspec.json.encode(job.training),
        capture_output=True,
        check=False,
    )
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == 2:
        raise ConfigurationError(said.splitlines()[-1] if said else "it failed", field="training")
    if done.returncode != 0:
        raise InternalError(f"measuring the model failed (exit code {done.returncode}):\n{said}")
    data = msgspec.json.decode(done.stdout, type=ProfileData)
    return msgspec.convert(msgspec.to_builtins(data), ModelProfile)


def planned(job: "Job", profile: "ModelProfile", nodes: int) -> "tuple[tuple[Template, ...], Plan]":
    """All templates up to ``nodes`` nodes, and the plan of a fresh start on them.

    :raises ConfigurationError: the job cannot run on so many nodes; says what would work.
    """
    from ftd.coordinator.planning import explain, first_or_next_plan
    from planner.errors import PlanningError, TooFewNodesError
    from planner.planner import Planner

    try:
        planner = Planner(profile, job.policy)
        plan = first_or_next_plan(planner, planner.fresh([f"node-{index}" for index in range(nodes)]))
        return tuple(planner.templates(nodes).by_nodes.values()), plan
    except TooFewNodesError as error:
        raise ConfigurationError(
            str(error), field="--nodes", remedy=f"at least {error.needed} are needed"
        ) from None
    except PlanningError as error:
        raise ConfigurationError(explain(error)) from None


def _as_json(templates: "tuple[Template, ...]", plan: "Plan") -> dict[str, Any]:
    import msgspec

    return {
        "schema": 1,
        "templates": [
            {**msgspec.to_builtins(template), "proved_optimal": template.proved_optimal}
            for template in templates
        ],
        "plan": msgspec.to_builtins(plan),
    }
