"""Entry point of the ``ftd`` command.

Exit codes: 0 success; 1 failure, or a rejected request; 2 wrong configuration or usage; 3 no broker or
cluster answers.
"""

import errno
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

import ftd
from ftd.errors import ConfigurationError, FtdError
from ftd.garbage import rare_collections

_OF_A_CLIENT = ("submit", "status", "events", "story", "drain", "readmit", "stop")
_COMMANDS = (
    *("init", "local", "coordinator", "node", *_OF_A_CLIENT, "top", "report", "trace", "bridge"),
    *("plan", "profile", "reliability", "replay", "acl", "contract", "install", "doctor", "sim"),
)
_GROUPS = ("snapshot", "chaos", "checkpoint", "data", "config")


@functools.cache
def _load(name: str) -> Any:
    """Import a command or a group of commands."""
    with rare_collections():  # Modules stay: searching them takes a tenth of the time that they take to load.
        module = importlib.import_module(f"ftd.cli.{'client' if name in _OF_A_CLIENT else name}")
        loaded = typer.Typer(rich_markup_mode=None)
        if name in _GROUPS:
            loaded.add_typer(module.group)
        else:
            loaded.command()(getattr(module, name))
        return get_group(loaded).commands[name]


class _Commands(Mapping[str, Any]):
    """All commands by name. Each is imported when it is used: all together take three times as long as one."""

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return _load(name)

    def __contains__(self, name: object) -> bool:
        return name in _COMMANDS or name in _GROUPS

    def __iter__(self) -> Iterator[str]:
        return iter((*_COMMANDS, *_GROUPS))

    def __len__(self) -> int:
        return len(_COMMANDS) + len(_GROUPS)


class _Group(TyperGroup):
    """The command line: a group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"commands": _Commands()}))


app = typer.Typer(
    name="ftd",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    prepare_streams()
    try:
        app(prog_name="ftd")
    except FtdError as error:
        for single in error.errors if isinstance(error, ConfigurationError) else (error,):
            print(f"ftd: {single}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - What is buffered cannot be written at the end either.
        remedy = "free some space, or write elsewhere"
        print(
            f"ftd: {error.filename or 'the output'} cannot be written: {error.strerror} ({remedy})",
            file=sys.stderr,
        )
        sys.exit(1)


def prepare_streams() -> None:
    """Make the standard streams usable, however the command was started.

    Each stream that was closed leads to ``/dev/null``, so that no connection gets its number and with it what is
    printed. Characters that the encoding of the terminal lacks are printed as question marks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # In the order of their numbers.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - It is never closed.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
