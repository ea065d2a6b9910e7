"""``ftd plan``: what the planner would do with a job, without a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import JsonOption, print_json, print_rich
from ftd.errors import ConfigurationError

if TYPE_CHECKING:
    from planner.describe import CrossCheck, Description
    from planner.errors import SolverError
    from planner.values import ModelProfile
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

    Builds the model once on this machine to measure its layers; nothing is trained. How the batch is
    distributed is checked against an integer program.

    Example: ftd plan examples/gpt.toml --nodes 13
    """
    from ftd.config.job import load_job
    from ftd.profiling.layers import measured_profile

    loaded = load_job(job, devices_per_node=devices_per_node)
    description, check = planned(loaded, measured_profile(loaded), nodes)
    if as_json:
        print_json(_as_json(description, check))
        return
    from ftd.view.plan import render_plan

    print_rich(render_plan(description, check, policy=loaded.policy))


def planned(
    job: "Job", profile: "ModelProfile", nodes: int
) -> "tuple[Description, CrossCheck | SolverError]":
    """The plan of a fresh start on ``nodes`` nodes, and the check of its batch distribution, if it worked.

    :raises ConfigurationError: the job cannot run on so many nodes; says what would work.
    """
    from ftd.coordinator.planning import explain, first_or_next_plan
    from planner.describe import cross_check, describe
    from planner.errors import PlanningError, SolverError, TooFewNodesError
    from planner.planner import Planner

    try:
        planner = Planner(profile, job.policy)
        plan = first_or_next_plan(planner, planner.fresh([f"node-{index}" for index in range(nodes)]))
    except TooFewNodesError as error:
        raise ConfigurationError(
            str(error), field="--nodes", remedy=f"at least {error.needed} are needed"
        ) from None
    except PlanningError as error:
        raise ConfigurationError(explain(error)) from None
    description = describe(planner, plan)
    try:
        return description, cross_check(planner, plan)
    except SolverError as error:
        return description, error


def _as_json(description: "Description", check: "CrossCheck | SolverError") -> dict[str, Any]:
    import msgspec

    from planner.errors import SolverError

    batch_check = (
        {"agrees": None, "reason": str(check)}
        if isinstance(check, SolverError)
        else {"agrees": check.agrees, **msgspec.to_builtins(check)}
    )
    return {"schema": 1, **msgspec.to_builtins(description), "batch_check": batch_check}
