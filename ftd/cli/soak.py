"""``ftd chaos soak``: injects random faults into a local cluster and checks invariants for some minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import JsonOption, silence_logs

if TYPE_CHECKING:
    from ftd.local.soak.options import SoakOptions
    from ftd.local.soak.report import SoakReport

JobArgument = Annotated[Path, typer.Argument(help="Job file.", metavar="JOB.toml")]
StepsOption = Annotated[int | None, typer.Option(min=2, help="Steps per round, instead of the job file's.")]
LimitOption = Annotated[
    float, typer.Option(min=5, help="Training must resume within this many seconds after a fault ends.")
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Largest relative difference between a step's loss and that of the run without faults.",
        show_default="1e-9 in float64, otherwise 1e-2",
    ),
]
BeyondOption = Annotated[
    bool, typer.Option("--beyond", help="Let more nodes fail at once than the job tolerates.")
]
MemoryOption = Annotated[
    int | None,
    typer.Option(min=1, help="Put snapshots into a memory of this many MiB and also fill it (needs root)."),
]
ReportOption = Annotated[
    Path | None, typer.Option(help="Write the report to this file.", metavar="FILE.json")
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw goodput over time to this file.", metavar="FILE.png|FILE.svg")
]
LogsOption = Annotated[
    Path | None,
    typer.Option(
        help="Write all logs here; without it, logs are kept only if a rule is broken.", metavar="DIR"
    ),
]


def soak(
    job: JobArgument,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=10_000, help="Minutes during which faults are injected.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random faults.")] = 0,
    rate: Annotated[float, typer.Option(min=0.1, max=120, help="Average number of faults per minute.")] = 8.0,
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Number of nodes to start.")] = 4,
    coordinators: Annotated[
        int, typer.Option(min=1, max=9, help="Number of coordinators: one leader, the others standbys.")
    ] = 1,
    steps: StepsOption = None,
    limit: LimitOption = 60.0,
    tolerance: ToleranceOption = None,
    beyond: BeyondOption = False,
    memory_mib: MemoryOption = None,
    broker: Annotated[str, typer.Option(help="Broker to use: embedded or mosquitto.")] = "mosquitto",
    report: ReportOption = None,
    plot: PlotOption = None,
    logs: LogsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Inject random faults into a cluster on this machine.

    For some minutes, processes are killed, stopped, hung, slowed down and disconnected, including the
    coordinator and the broker. Meanwhile rules about committed steps, losses, generations, recoveries and
    processes are checked, and goodput is measured against a run without faults.

    The exit code is 1 if a rule was broken; the output then shows how to repeat the run.

    Example: ftd chaos soak --minutes 5 --seed 1 examples/mlp.toml --plot soak.png
    """
    from ftd.local.run import require_writable
    from ftd.local.soak.options import SoakOptions
    from ftd.local.soak.plot import FORMATS, plot_soak
    from ftd.local.soak.report import render_lines
    from ftd.observe.view.files import require_format, write_file

    silence_logs()
    if plot is not None:
        require_format(plot, FORMATS, "--plot")
    require_writable(report)
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
    found = _run(options, as_json)
    typer.echo(found.to_bytes().decode().rstrip() if as_json else "\n".join(render_lines(found)))
    if report is not None:
        write_file(report, found.to_bytes(), "--report")
    if plot is not None:
        plot_soak(found, plot)
    raise typer.Exit(0 if found.passed else 1)


def _run(options: "SoakOptions", as_json: bool) -> "SoakReport":
    """Run the soak; progress goes to stderr if stdout is for JSON. Ctrl-C and SIGTERM end everything."""
    import asyncio

    import uvloop

    from ftd.local.run import cancel_on_signals
    from ftd.local.soak.soak import run_soak

    async def run() -> "SoakReport | int":
        task = asyncio.ensure_future(run_soak(options, lambda line: typer.echo(line, err=as_json)))
        caught = cancel_on_signals(task)
        try:
            return await task
        except asyncio.CancelledError:
            return 128 + caught["signal"]

    found = uvloop.run(run())
    if isinstance(found, int):
        typer.echo("stopped: all processes have ended, and temporary files are removed", err=True)
        raise typer.Exit(found)
    return found
