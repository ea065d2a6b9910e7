"""Options that several commands share: which cluster, and how to print."""

import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ftd.config.locate import find_cluster
from ftd.transport.address import ClusterAddress

T = TypeVar("T")

BrokerOption = Annotated[
    str | None,
    typer.Option("--broker", help="mqtt://host:port; default: $FTD_BROKER, or the ftd local that runs here."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Name of the cluster; default: $FTD_CLUSTER, the only ftd local that runs here, or 'ftd'.",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Take broker and cluster from this ftd.toml.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for scripts instead of text for people.")]


def address_of(broker: str | None, cluster: str | None, config: Path | None) -> ClusterAddress:
    """:raises ConfigurationError: nothing says which cluster is meant."""
    return find_cluster(broker, cluster, config)


def say_cluster(address: ClusterAddress) -> None:
    """Name, on stderr, the cluster that a command is about to change."""
    typer.echo(f"ftd: cluster {address.cluster} at {address.broker.url}", err=True)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Ctrl-C ends it with the shell's code for that, without a traceback."""
    import asyncio

    silence_logs()
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def silence_logs() -> None:
    """The session logs how it connects; for a command only its result matters."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("mqtt").setLevel(logging.CRITICAL)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, separators=(",", ":")))


def print_rich(renderable: Any) -> None:
    """Render for the terminal, or plainly into a pipe (wide enough not to cut names)."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(renderable)
