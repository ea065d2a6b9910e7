"""``ftd install``: installs a daemon as a systemd service."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer


def install(
    role: Annotated[Literal["node", "coordinator"], typer.Argument(help="Daemon to install on this host.")],
    config: Annotated[
        Path, typer.Option(help="ftd.toml that the service reads; a sample is written if it does not exist.")
    ] = Path("/etc/ftd/ftd.toml"),
    executable: Annotated[
        Path | None, typer.Option(help="Program ftd that the service runs.", show_default="this one")
    ] = None,
    writable: Annotated[
        list[Path] | None,
        typer.Option(
            help="Directory that the service may write besides its own, for persistent checkpoints; "
            "may be repeated."
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Install below this directory, for images and tests.")] = Path(
        "/"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")] = False,
) -> None:
    """Install a node or a coordinator as a systemd service.

    The command writes a hardened unit, the definitions of its user and directories, and a sample
    configuration.

    Existing units are overwritten, but never an existing configuration. Nothing is started: the command
    prints what to do next.

    Example: ftd install node --dry-run
    """
    from ftd.cli.units.files import files_for, hidden_from_others, next_steps
    from ftd.cli.units.files import write_files as write
    from ftd.cli.units.units import InstallPaths
    from ftd.errors import ConfigurationError

    for path, field in ((config, "--config"), *((path, "--writable") for path in writable or ())):
        if not path.is_absolute():
            raise ConfigurationError(
                f"{path} is a relative path", field=field, remedy="write the absolute path"
            )
        if not str(path).isprintable():  # A line break would begin another line of the unit.
            raise ConfigurationError(
                f"{str(path)!r} has a character that a systemd unit cannot hold",
                field=field,
                remedy="name another path",
            )
    if os.path.isdir(root / config.relative_to(config.anchor)):  # noqa: PTH112 - is_dir raises errors.
        raise ConfigurationError(
            f"{config} is a directory", field="--config", remedy="name the file ftd.toml in it"
        )
    program = executable or _current_program()
    if not program.is_absolute() or not os.path.isfile(program):  # noqa: PTH113 - is_file raises errors.
        raise ConfigurationError(
            f"{program} is not the absolute path of a file",
            field="--executable",
            remedy="write the absolute path of the program ftd",
        )
    files = files_for(role, InstallPaths(executable=program, config=config, writable=tuple(writable or ())))
    if dry_run:
        for file in files:
            typer.echo(f"# --- {root / file.path.relative_to(file.path.anchor)}\n{file.text}")
        return
    for path, outcome in write(files, root):
        typer.echo(f"{outcome:<10} {path}")
    if (hidden := hidden_from_others(program)) is not None:
        typer.echo(
            f"warning: the user ftd cannot run {program}, because others have no access to {hidden}", err=True
        )
    typer.echo("\nNext:\n" + "\n".join(f"  {step}" for step in next_steps(role, config)))


def _current_program() -> Path:
    """Return the program ftd that is running, in its virtual environment."""
    import sys

    in_environment = Path(sys.executable).parent / "ftd"
    return in_environment if in_environment.is_file() else Path(sys.argv[0]).absolute()
