"""``ftd acl``: rights at the broker."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("acl")(acl)


def acl(
    nodes: Annotated[str, typer.Option(help="Names of the nodes, with commas; each is a user of that name.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's user.")] = "coordinator",
    operators: Annotated[str, typer.Option(help="Users who may submit, stop, drain.")] = "",
    tools: Annotated[str, typer.Option(help="Users who may only read states and events.")] = "",
    chaos: Annotated[str, typer.Option(help="Operators who may also inject faults.")] = "",
    cluster: Annotated[str, typer.Option(help="The cluster's name.")] = "ftd",
) -> None:
    """Print an ACL file for mosquitto: who may write what.

    A node may write only its own topics, a tool may only read.

    Make a password for each user with mosquitto_passwd, and name both files in mosquitto.conf.

    Example: ftd acl --nodes host-a,host-b --operators alice --tools grafana > ftd.acl
    """
    from ftd.transport.mqtt.acl import Users, acl_text

    users = Users(
        nodes=_names(nodes),
        coordinator=coordinator,
        operators=_names(operators),
        tools=_names(tools),
        chaos=_names(chaos),
    )
    typer.echo(acl_text(cluster, users), nl=False)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
