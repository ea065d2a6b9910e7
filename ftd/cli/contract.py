"""``ftd contract``: prints the MQTT contract for other tools, and compares it with earlier ones."""

from pathlib import Path
from typing import Annotated

import typer


def contract(
    against: Annotated[
        Path | None,
        typer.Option(
            help="List what this version breaks of an earlier contract. The exit code is 1 if it breaks any."
        ),
    ] = None,
) -> None:
    """Print the contract for other tools (AsyncAPI 3).

    It has every topic, message and field (docs/how-to/recipes.md).

    Example: ftd contract > asyncapi.json
    """
    from ftd.transport.wire.contract_file import read_contract, read_shipped_contract

    if against is None:
        typer.echo(read_shipped_contract().decode(), nl=False)
        return
    import msgspec

    from ftd.transport.wire.compatibility import breaking_changes

    problems = breaking_changes(read_contract(against), msgspec.json.decode(read_shipped_contract()))
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"this version is compatible with {against}")
