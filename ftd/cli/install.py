"""``ftd install``: a daemon as a systemd service."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    app.command("install")(install)


def install(
    role: Annotated[Literal["node", "coordinator"], typer.Argument(help="What this host is to run.")],
    config: Annotated[
        Path, typer.Option(help="ftd.toml that the service reads; a sample is written where there is none.")
    ] = Path("/etc/ftd/ftd.toml"),
    executable: Annotated[
        Path | None, typer.Option(help="The ftd that the service runs; default: this one.")
    ] = None,
    writable: Annotated[
        list[Path] | None,
        typer.Option(help="Where the service may write besides its own: for persistent checkpoints."),
    ] = None,
    root: Annotated[Path, typer.Option(help="Install below this directory instead (images, tests).")] = Path(
        "/"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")] = False,
) -> None:
    """Install a node or a coordinator as a systemd service.

    It writes a hardened unit, its user and directories, and a sample configuration.

    Units are overwritten, a configuration never is. Nothing is started: the commands for that are printed.

    Example: ftd install node --dry-run
    """
    from ftd.cli.units.files import files_for, hidden_from_others, next_steps
    from ftd.cli.units.files import write_files as write
    from ftd.cli.units.units import InstallPaths
    from ftd.errors import ConfigurationError

    for path, field in ((config, "--config"), *((path, "--writable") for path in writable or ())):
        if not path.is_absolute():
            raise ConfigurationError(f"{path} is relative", field=field, remedy="give the whole path")
    program = executable or _this()
    if not program.is_absolute() or not program.is_file():
        raise ConfigurationError(f"{program} is no file", field="--executable", remedy="give the whole path")
    files = files_for(role, InstallPaths(executable=program, config=config, writable=tuple(writable or ())))
    if dry_run:
        for file in files:
            typer.echo(f"# --- {root / file.path.relative_to('/')}\n{file.text}")
        return
    for path, outcome in write(files, root):
        typer.echo(f"{outcome:<10} {path}")
    if (hidden := hidden_from_others(program)) is not None:
        typer.echo(f"warning: user ftd cannot reach {program}: {hidden} is closed to others", err=True)
    typer.echo("\nNext:\n" + "\n".join(f"  {step}" for step in next_steps(role)))


def _this() -> Path:
    """The ftd that runs now, through its virtual environment."""
    import sys

    beside = Path(sys.executable).parent / "ftd"
    return beside if beside.is_file() else Path(sys.argv[0]).absolute()
