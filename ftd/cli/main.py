"""Entry point of the ``ftd`` command.

Exit codes: 0 success; 1 failure, or a rejected request; 2 wrong configuration or usage; 3 no broker or
cluster answers.
"""

import sys
from typing import Annotated

import typer

import ftd
from ftd.errors import ConfigurationError, FtdError
from ftd.garbage import rare_collections

with rare_collections():  # Modules stay: searching them takes a tenth of the time that they take to load.
    from ftd.cli import chaos, checkpoint, config, data, snapshot
    from ftd.cli.acl import acl
    from ftd.cli.bridge import bridge
    from ftd.cli.client import drain, events, readmit, status, stop, story, submit
    from ftd.cli.contract import contract
    from ftd.cli.coordinator import coordinator
    from ftd.cli.doctor import doctor
    from ftd.cli.init import init
    from ftd.cli.install import install
    from ftd.cli.local import local
    from ftd.cli.node import node
    from ftd.cli.plan import plan
    from ftd.cli.profile import profile
    from ftd.cli.reliability import reliability
    from ftd.cli.replay import replay
    from ftd.cli.report import report
    from ftd.cli.sim import sim
    from ftd.cli.top import top
    from ftd.cli.trace import trace

app = typer.Typer(
    name="ftd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_OF_A_CLUSTER = (submit, status, events, story, drain, readmit, stop, top, report, trace, bridge)
_WITHOUT_CLUSTER = (plan, profile, reliability, replay, acl, contract, install, doctor, sim)
for command in (init, local, coordinator, node, *_OF_A_CLUSTER, *_WITHOUT_CLUSTER):
    app.command()(command)
for module in (snapshot, chaos, checkpoint, data, config):
    app.add_typer(module.group)


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
