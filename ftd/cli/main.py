"""Entry point of the ``ftd`` command.

Exit codes: 0 success; 1 failure, or a rejected request; 2 wrong configuration or usage; 3 no broker or
cluster answers.
"""

import sys
from typing import Annotated

import typer

import ftd
from ftd.cli import (
    acl,
    bridge,
    chaos,
    checkpoint,
    client,
    config,
    contract,
    coordinator,
    data,
    doctor,
    init,
    install,
    local,
    node,
    plan,
    profile,
    reliability,
    replay,
    report,
    sim,
    snapshot,
    top,
    trace,
)
from ftd.errors import ConfigurationError, FtdError

app = typer.Typer(
    name="ftd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_RUNNING = (init, local, coordinator, node, client, top, report, snapshot, trace, chaos, bridge)
for module in (
    *_RUNNING,
    plan,
    profile,
    reliability,
    replay,
    checkpoint,
    data,
    config,
    acl,
    contract,
    install,
    doctor,
    sim,
):
    module.register(app)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ftd {ftd.__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Keep distributed PyTorch training running through failures.

    Start a whole cluster on this machine: ftd local examples/gpt.toml --nodes 4
    """


def main() -> None:
    """Run a command; print our own errors as single lines on stderr, and return their exit code."""
    try:
        app(prog_name="ftd")
    except FtdError as error:
        for single in error.errors if isinstance(error, ConfigurationError) else (error,):
            print(f"ftd: {single}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
