"""``ftd local``: a whole cluster on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import silence_logs

PLAIN_COLUMNS = 110
"""Width of what is printed into a file or a pipe, where there is no terminal to ask."""


def register(app: typer.Typer) -> None:
    app.command("local")(local)


def local(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")],
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Node daemons to start.")],
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead of the file's.")] = None,
    devices_per_node: Annotated[int, typer.Option(min=1, max=64, help="Trainers on each node.")] = 1,
    chaos: Annotated[
        Path | None, typer.Option(help="Scenario of faults to inject.", metavar="SCENARIO.toml")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the report of the run here.", metavar="FILE.json")
    ] = None,
    broker: Annotated[str, typer.Option(help="embedded, mosquitto, or mqtt://host:port.")] = "embedded",
    coordinators: Annotated[int, typer.Option(min=1, max=9, help="One leads, others stand by.")] = 1,
    view: Annotated[bool, typer.Option(help="Show the run while it lasts.")] = True,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the logs of all processes here.", metavar="DIR")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Name of the cluster; default: ftd, or ftd-2, ... beside others.")
    ] = None,
) -> None:
    """Train a job on a whole cluster on this machine.

    It starts a broker, a coordinator and nodes node-0, node-1, ... The other commands find it while it runs;
    where several local clusters run, they ask for --cluster NAME.
    Ctrl-C ends everything and leaves nothing behind but the summary and the report. Exit code 0 when the job
    has finished, 1 when it failed or was stopped.

    Example: ftd local examples/gpt.toml --nodes 4 --chaos examples/demo-chaos.toml --report report.json
    """
    import asyncio

    import uvloop
    from rich.console import Console

    from ftd.local.run import LocalOptions, cancel_on_signals, run_local

    silence_logs()
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    options = LocalOptions(
        job=job,
        nodes=nodes,
        steps=steps,
        devices_per_node=devices_per_node,
        chaos=chaos,
        report=report,
        broker=broker,
        coordinators=coordinators,
        view=view,
        logs=logs,
        cluster=cluster,
    )

    async def run() -> int:
        task = asyncio.ensure_future(run_local(options, console))
        caught = cancel_on_signals(task)
        try:
            return await task
        except asyncio.CancelledError:
            console.print("stopped: everything is ended and cleaned up")
            return 128 + caught["signal"]

    raise typer.Exit(uvloop.run(run()))
