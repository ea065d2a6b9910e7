"""``ftd config``: shows and checks ``ftd.toml``, and prints its reference and schema."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import JsonOption, print_json

FileOption = Annotated[
    Path | None,
    typer.Option("--config", help="Path of ftd.toml.", show_default="defaults and environment"),
]


group = typer.Typer(
    name="config",
    help="Show and check the configuration of the daemons.\n\n"
    "Example: ftd config check --config /etc/ftd/ftd.toml",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@group.command()
def show(config: FileOption = None, as_json: JsonOption = False) -> None:
    """Show every key with its value and its origin.

    The origin is the file, a variable of the environment, or the default.

    Secrets are hidden. A wrong configuration is an error, as it is for a daemon.

    Example: ftd config show --config ftd.toml
    """
    from ftd.config.daemon import list_effective_settings

    settings = list_effective_settings(config)
    if as_json:
        print_json({s.key.name: {"value": s.shown, "from": s.origin} for s in settings})
        return
    wide = max(len(s.key.name) for s in settings)
    values = [json.dumps(s.shown, ensure_ascii=False) if s.shown is not None else "–" for s in settings]
    longest = min(40, max(len(value) for value in values))
    for setting, value in zip(settings, values, strict=True):
        typer.echo(f"{setting.key.name:<{wide}}  {value:<{longest}}  {setting.origin}")


@group.command()
def check(
    config: Annotated[Path, typer.Option("--config", help="Path of this host's ftd.toml.")],
    node: Annotated[
        bool, typer.Option("--node", help="Also check what only a node needs: the secret.")
    ] = False,
) -> None:
    """Check the file as a daemon would.

    If something is wrong, the exit code is 2, and each wrong field is printed with its remedy.

    Example: ftd config check --config /etc/ftd/ftd.toml --node
    """
    from ftd.config.daemon import examine_daemon_config

    loaded, collector = examine_daemon_config(config)
    if node and not collector.affect("", "secret", "secret_file"):
        with collector.collect():
            loaded.require_secret()
    collector.raise_any()
    typer.echo(f"{config} is valid: cluster {loaded.cluster}, node {loaded.node}, broker {loaded.broker.url}")


@group.command()
def schema() -> None:
    """Print the JSON Schema of ftd.toml, for editors and tools.

    Example: ftd config schema > ftd.schema.json
    """
    from ftd.config.daemon_file import daemon_schema

    typer.echo(json.dumps(daemon_schema(), indent=2))


@group.command()
def reference() -> None:
    """Print all keys of both files as a Markdown page.

    It has their defaults, environment variables and descriptions.

    Example: ftd config reference > docs/reference/keys.md
    """
    from ftd.config.daemon_file import render_daemon_reference
    from ftd.config.job_reference import render_job_reference

    typer.echo(f"{render_daemon_reference()}\n{render_job_reference()}", nl=False)
