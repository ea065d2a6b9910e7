"""``ftd plan``: shows what the planner would do with a job or a profile, without a cluster."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import (
    CheckpointingOption,
    DevicesOption,
    JsonOption,
    ProfileOption,
    TolerateOption,
    print_json,
    print_rich,
    with_table_options,
)
from ftd.cli.plan_request import (
    MAX_MICROBATCHES,
    MAX_NODES,
    PlanOptions,
    PlanRequest,
    build_plan_request,
)
from planner.values import PlannerOptions

if TYPE_CHECKING:
    from ftd.snapshots.protection import SnapshotProtection
    from planner.crosscheck import CrossCheck
    from planner.describe import Description, PipelineRow, TemplateRow
    from planner.errors import SolverError
    from planner.preview import Preview

SCHEMA_VERSION = 2
PLOT_FORMATS = (".svg", ".png", ".html")


@with_table_options(PlannerOptions)
def plan(
    nodes: Annotated[int, typer.Option(min=1, max=MAX_NODES, help="Number of nodes to plan for.")],
    job: Annotated[
        Path | None,
        typer.Argument(help="Job file; its model is measured on this machine.", metavar="[JOB.toml]"),
    ] = None,
    profile: ProfileOption = None,
    gpus_per_node: DevicesOption = None,
    template_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Show only the template for this many nodes.", show_default="all"),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_MICROBATCHES,
            help="Microbatches per step, over all pipelines.",
            show_default="the job's, or 4 per device",
        ),
    ] = None,
    tolerate: TolerateOption = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of one device, such as 80GiB, or in bytes.", show_default="the profile's"),
    ] = None,
    activation_checkpointing: CheckpointingOption = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Also plan with the other objective.",
            show_default="compare, but not with --json",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the batch distribution against an integer program.")
    ] = False,
    protection: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help="Protection of snapshots: none, arc:k, aec, aec2, buddy, joined by +, or auto.",
            show_default="the job's, if it takes snapshots",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw timelines and memory to FILE.svg, FILE.png or FILE.html.")
    ] = None,
    as_json: JsonOption = False,
    **planner: Any,
) -> None:
    """Show which pipelines the planner would build, and why.

    It also shows the pipeline templates of the model, from which the pipelines are built.

    Give a profile or a job file. With a job file, the model is built once on this machine to measure its
    layers. Nothing is trained.

    Example: ftd plan examples/gpt.toml --nodes 13
    """
    if plot is not None:
        from ftd.observe.view.files import require_format

        require_format(plot, PLOT_FORMATS, "--plot")
    request = build_plan_request(
        PlanOptions(
            job=job,
            profile=profile,
            nodes=nodes,
            devices_per_node=gpus_per_node or 1,
            template_nodes=template_nodes,
            microbatches=microbatches,
            tolerate=tolerate,
            memory=memory,
            activation_checkpointing=activation_checkpointing,
            planner=planner,
            protection=protection,
        )
    )
    _print_plan(
        request, compare=not as_json if compare is None else compare, check=check, plot=plot, as_json=as_json
    )


def _print_plan(
    request: PlanRequest, *, compare: bool, check: bool, plot: Path | None, as_json: bool
) -> None:
    """Plan, and print the result in every form that was asked for."""
    from planner.describe import describe

    # Loading its packages is not part of the planning time.
    import planner.preview  # isort: skip  # noqa: F401

    started_s = time.perf_counter()
    seen = request.preview()
    planning_s = time.perf_counter() - started_s
    description = describe(seen)
    other = describe(request.other_objective().preview()) if compare else None
    checked = _checked(seen) if check else None
    protection = request.snapshot_protection(seen)
    if as_json:
        document = _as_json(description, planning_s, other, checked)
        print_json(
            document if protection is None else document | {"protection": _protection_json(protection)}
        )
    else:
        from ftd.observe.view.plan import render_plan

        print_rich(render_plan(description, planning_s=planning_s, other=other, check=checked))
        if protection is not None:
            from ftd.observe.view.protection import render_protection

            print_rich(render_protection(protection))
    if plot is not None:
        from ftd.observe.view.plots.plan_plot import plot_plan

        plot_plan(description, plot, name=request.name, other=other)


def _checked(seen: "Preview") -> "CrossCheck | SolverError":
    from planner.crosscheck import cross_check
    from planner.errors import SolverError

    try:
        return cross_check(seen)
    except SolverError as error:
        return error


def _as_json(
    description: "Description",
    planning_s: float,
    other: "Description | None",
    check: "CrossCheck | SolverError | None",
) -> dict[str, Any]:
    """Return the result as JSON; ``docs/how-to/planning.md`` explains every field."""
    policy = description.policy
    document: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "planning_s": planning_s,
        **_fields(policy, *PlannerOptions.__struct_fields__),
        **_fields(description, "nodes", "layers", "memory_limit_bytes"),
        **_fields(policy, "devices_per_node", "tolerate", "microbatches", "microbatch_rows"),
        "activation_checkpointing": policy.activation_checkpointing,
        "templates": [_template_json(row) for row in description.templates],
        "instantiation": {
            **_fields(description, "iteration_ms", "samples_per_s", "bubble_ratio", "idle_nodes"),
            "pipelines": [_pipeline_json(row) for row in description.pipelines for _ in range(row.count)],
        },
    }
    if other is not None:
        document["comparison"] = {
            "objective": other.policy.objective,
            "iteration_ms": other.iteration_ms,
            "pipelines": [_pipeline_json(row) for row in other.pipelines for _ in range(row.count)],
        }
    if check is not None:
        document["batch_check"] = _check_json(check)
    return document


def _template_json(row: "TemplateRow") -> dict[str, Any]:
    costs = (
        "recompute",
        "within",
        "replicas",
        "forward_ms",
        "backward_ms",
        "memory_bytes",
        "undivided_bytes",
    )
    return {
        **_fields(
            row, "nodes", "objective_ms", "lower_bound_ms", "proved_optimal", "microbatches", "memory_bytes"
        ),
        "stages": [[stage.first_layer, stage.end_layer, stage.devices] for stage in row.stages],
        "stage_costs": [{"node": stage.node_offset, **_fields(stage, *costs)} for stage in row.stages],
    }


def _pipeline_json(row: "PipelineRow") -> dict[str, Any]:
    names = ("nodes", "microbatches", "step_ms", "makespan_ms", "sync_ms", "bubble_ratio", "memory_bytes")
    return _fields(row, *names)


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _check_json(check: "CrossCheck | SolverError") -> dict[str, Any]:
    import msgspec

    from planner.errors import SolverError

    if isinstance(check, SolverError):
        return {"agrees": None, "reason": str(check)}
    return {"agrees": check.agrees, **msgspec.to_builtins(check)}


def _protection_json(protection: "SnapshotProtection") -> dict[str, Any]:
    import msgspec

    names = (
        "scheme",
        "reason",
        "guarantee",
        "overhead",
        "node_bytes",
        "arena_bytes",
        "arena_peak_bytes",
        "buddy",
    )
    return {
        **_fields(protection, *names),
        "replicas": msgspec.to_builtins(protection.replicas),
        "groups": msgspec.to_builtins(protection.groups),
    }
