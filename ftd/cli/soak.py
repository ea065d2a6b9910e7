"""``ftd chaos soak``: random faults on a cluster of its own, watched for some minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import JsonOption, silence_logs

if TYPE_CHECKING:
    from ftd.local.soak.options import SoakOptions
    from ftd.local.soak.report import SoakReport

JobArgument = Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")]
StepsOption = Annotated[int | None, typer.Option(min=2, help="Steps of each round, not the job file's.")]
LimitOption = Annotated[
    float, typer.Option(min=5, help="Training must go on so many seconds after a fault is over.")
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="How much of itself a step's loss may differ from the undisturbed run's; default: 1e-9 in "
        "float64, otherwise 1e-2.",
    ),
]
BeyondOption = Annotated[
    bool, typer.Option("--beyond", help="Strike more nodes at once than the job tolerates.")
]
MemoryOption = Annotated[
    int | None,
    typer.Option(min=1, help="Give snapshots a memory of this size and fill it, too (needs root)."),
]
ReportOption = Annotated[Path | None, typer.Option(help="Write what was found here.", metavar="FILE.json")]
PlotOption = Annotated[
    Path | None, typer.Option(help="Goodput over time as a picture.", metavar="FILE.png|FILE.svg")
]
LogsOption = Annotated[
    Path | None,
    typer.Option(help="Keep all logs here; they are kept anyway when a rule is broken.", metavar="DIR"),
]


def soak(
    job: JobArgument,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_000, help="How long faults strike.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Draws the faults.")] = 0,
    rate: Annotated[float, typer.Option(min=0.1, max=120, help="Faults a minute, on average.")] = 8.0,
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Node daemons to start.")] = 4,
    coordinators: Annotated[int, typer.Option(min=1, max=9, help="One leads, others stand by.")] = 1,
    steps: StepsOption = None,
    limit: LimitOption = 60.0,
    tolerance: ToleranceOption = None,
    beyond: BeyondOption = False,
    memory_mib: MemoryOption = None,
    broker: Annotated[str, typer.Option(help="embedded or mosquitto.")] = "mosquitto",
    report: ReportOption = None,
    plot: PlotOption = None,
    logs: LogsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let random faults strike a cluster on this machine.

    For some minutes, watching for what must not happen.

    Processes are killed, stopped, hung, slowed down and cut off, coordinator and broker included. Committed
    steps, losses, generations, recoveries and processes are watched; goodput is measured against an
    undisturbed run. Exit code 1 when a rule was broken, with what is needed to repeat it.

    Example: ftd chaos soak --minutes 5 --seed 1 examples/mlp.toml --plot soak.png
    """
    from ftd.local.run import require_writable
    from ftd.local.soak.options import SoakOptions
    from ftd.local.soak.plot import plot_soak, require_picture
    from ftd.local.soak.report import render_lines

    silence_logs()
    require_picture(plot)
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
    if report is not None:
        report.write_bytes(found.to_bytes())
    if plot is not None:
        plot_soak(found, plot)
    typer.echo(found.to_bytes().decode().rstrip() if as_json else "\n".join(render_lines(found)))
    raise typer.Exit(0 if found.passed else 1)


def _run(options: "SoakOptions", as_json: bool) -> "SoakReport":
    """Progress goes to stderr where stdout is for JSON. Ctrl-C and SIGTERM end everything."""
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
        typer.echo("stopped: everything is ended and cleaned up", err=True)
        raise typer.Exit(found)
    return found
