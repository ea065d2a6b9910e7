"""``ftd chaos soak``: injects random faults into a local cluster and checks invariants for some minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import JsonOption, run_until_signal

if TYPE_CHECKING:
    from ftd.local.soak.report import SoakReport


def soak(
    job: Annotated[Path, typer.Argument(help="Job file.", metavar="JOB.toml")],
    minutes: Annotated[
        float, typer.Option(min=0.1, max=10_000, help="Minutes during which faults are injected.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random faults.")] = 0,
    rate: Annotated[float, typer.Option(min=0.1, max=120, help="Average number of faults per minute.")] = 8.0,
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Number of nodes to start.")] = 4,
    coordinators: Annotated[
        int, typer.Option(min=1, max=9, help="Number of coordinators: one leader, the others standbys.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps per round, instead of the job file's.")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=5, help="Training must resume within this many seconds after a fault ends.")
    ] = 60.0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest relative difference between a step's loss and that of the run without faults.",
            show_default="1e-2; in float64 1e-9, or 1e-6 with [model]",
        ),
    ] = None,
    beyond: Annotated[
        bool, typer.Option("--beyond", help="Let more nodes fail at once than the job tolerates.")
    ] = False,
    memory_mib: Annotated[
        int | None,
        typer.Option(
            min=1, help="Put snapshots into a memory of this many MiB and also fill it (needs root)."
        ),
    ] = None,
    broker: Annotated[str, typer.Option(help="Broker to use: embedded or mosquitto.")] = "mosquitto",
    report: Annotated[
        Path | None, typer.Option(help="Write the report to this file.", metavar="FILE.json")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw goodput over time to this file.", metavar="FILE.png|FILE.svg")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Write all logs here; without it, logs are kept only if a rule is broken.", metavar="DIR"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Inject random faults into a cluster on this machine.

    For some minutes, processes are killed, stopped, hung, slowed down and disconnected, including the
    coordinator and the broker. Meanwhile rules about committed steps, losses, generations, recoveries and
    processes are checked, and goodput is measured against a run without faults.

    The exit code is 1 if a rule was broken; the output then shows how to repeat the run.

    Example: ftd chaos soak --minutes 5 --seed 1 examples/mlp.toml --plot soak.png
    """
    from ftd.local.soak.options import SoakOptions
    from ftd.local.soak.plot import FORMATS, plot_soak
    from ftd.local.soak.report import render_lines
    from ftd.local.soak.soak import run_soak
    from ftd.observe.view.files import require_distinct, require_format, require_writable, write_file
    from ftd.transport.wire.public import encode_document

    if plot is not None:
        require_format(plot, FORMATS, "--plot")
    require_writable(report, "--report")
    require_distinct(("--report", report), ("--plot", plot), ("--logs", logs), read=[("JOB.toml", job)])
    options = SoakOptions(
        job=job,
        minutes=minutes,
        seed=seed,
        rate_per_min=rate,
        nodes=nodes,
        coordinators=coordinators,
        steps=steps,
        limit_s=limit,
        relative=tolerance,
        beyond=beyond,
        memory_mib=memory_mib,
        broker=broker,
        logs=logs,
    )
    passed = False

    def on_report(found: "SoakReport") -> None:
        nonlocal passed
        passed = found.passed
        typer.echo(encode_document(found).decode().rstrip() if as_json else "\n".join(render_lines(found)))
        if report is not None:
            write_file(report, encode_document(found), "--report")
        if plot is not None:
            plot_soak(found, plot)

    # Progress goes to stderr if stdout is for JSON.
    soaking = run_soak(options, lambda line: typer.echo(line, err=as_json), on_report)
    run_until_signal(soaking, lambda line: typer.echo(line, err=True))
    raise typer.Exit(0 if passed else 1)
