"""``ftd config``: what ``ftd.toml`` says, whether it would do, and what may stand in it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import JsonOption, print_json

FileOption = Annotated[
    Path | None, typer.Option("--config", help="ftd.toml; without it, the defaults and the environment.")
]


def register(app: typer.Typer) -> None:
    config = typer.Typer(
        name="config",
        help="Look at the configuration of the daemons.\n\n"
        "Example: ftd config check --config /etc/ftd/ftd.toml",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for command in (show, check, schema, reference):
        config.command(command.__name__)(command)
    app.add_typer(config)


def show(config: FileOption = None, as_json: JsonOption = False) -> None:
    """Show every key with its value, and where that comes from.

    From the file, the environment, or the default.

    Secrets are not shown. What is wrong is an error, as it is for a daemon.

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


def check(
    config: Annotated[Path, typer.Option("--config", help="ftd.toml of this host.")],
    node: Annotated[bool, typer.Option("--node", help="Also what only a node needs: the secret.")] = False,
) -> None:
    """Read the file as a daemon would. Exit code 2, each wrong field and its remedy when something is wrong.

    Example: ftd config check --config /etc/ftd/ftd.toml --node
    """
    from ftd.config.daemon import examine_daemon_config

    loaded, mistakes = examine_daemon_config(config)
    if node and not mistakes.affect("", "secret", "secret_file"):
        with mistakes.collect():
            loaded.require_secret()
    mistakes.raise_any()
    typer.echo(f"{config} is sound: cluster {loaded.cluster}, node {loaded.node}, broker {loaded.broker.url}")


def reference() -> None:
    """Print all keys of both files as a page, in Markdown.

    With their defaults, variables and meanings.

    Example: ftd config reference > docs/reference/keys.md
    """
    from ftd.config.daemon_file import render_daemon_reference
    from ftd.config.job_reference import render_job_reference

    typer.echo(f"{render_daemon_reference()}\n{render_job_reference()}", nl=False)


def schema() -> None:
    """Print the JSON Schema of ftd.toml, for editors and tools.

    Example: ftd config schema > ftd.schema.json
    """
    from ftd.config.daemon_file import daemon_schema as made

    typer.echo(json.dumps(made(), indent=2))
