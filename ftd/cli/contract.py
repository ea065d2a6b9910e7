"""``ftd contract``: what other tools may rely on."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("contract")(contract)


def contract(
    against: Annotated[
        Path | None, typer.Option(help="Say what this ftd breaks of an earlier contract; exit code 1 if any.")
    ] = None,
) -> None:
    """Print the contract for other tools, an AsyncAPI 3 document.

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
    typer.echo(f"nothing of {against} is broken")
