"""``ftd local``: trains a job on a whole cluster on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import run_until_signal, text_console

PLAIN_COLUMNS = 110
"""Width of output to a file or a pipe, which has no terminal width."""
MAX_NODES = 64
MAX_DEVICES = 64


def local(
    job: Annotated[Path, typer.Argument(help="Job file.", metavar="JOB.toml")],
    nodes: Annotated[int, typer.Option(min=1, max=MAX_NODES, help="Number of nodes to start.")],
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead of the file's.")] = None,
    devices_per_node: Annotated[
        int, typer.Option(min=1, max=MAX_DEVICES, help="Number of trainers on each node.")
    ] = 1,
    chaos: Annotated[
        Path | None, typer.Option(help="Scenario of faults to inject.", metavar="SCENARIO.toml")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report of the run to this file.", metavar="FILE.json")
    ] = None,
    broker: Annotated[
        str, typer.Option(help="Broker to use: embedded, mosquitto, or mqtt://host:port.")
    ] = "embedded",
    coordinators: Annotated[
        int, typer.Option(min=1, max=9, help="Number of coordinators: one leader, the others standbys.")
    ] = 1,
    view: Annotated[bool, typer.Option(help="Show a live view.")] = True,
    logs: Annotated[
        Path | None, typer.Option(help="Write the logs of all processes here.", metavar="DIR")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Name of the cluster.", show_default="ftd; ftd-2 and so on if that is taken"),
    ] = None,
) -> None:
    """Train a job on a whole cluster on this machine.

    The command starts a broker, a coordinator and the nodes node-0, node-1 and so on. Other commands find
    this cluster while it runs; if several local clusters run, they need --cluster NAME.

    Ctrl-C ends everything and leaves only the summary and the report. The exit code is 0 if the job finished,
    and 1 if it failed or was stopped.

    Example: ftd local examples/gpt.toml --nodes 4 --chaos examples/demo-chaos.toml --report report.json
    """
    from ftd.local.run import LocalOptions, run_local

    console = text_console()
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
    raise typer.Exit(run_until_signal(run_local(options, console), console.print))
