"""``ftd acl``: access rights at the broker."""

from typing import Annotated

import typer


def acl(
    nodes: Annotated[
        str, typer.Option(help="Names of the nodes, separated by commas; each node is the user of that name.")
    ],
    coordinator: Annotated[str, typer.Option(help="User of the coordinators.")] = "coordinator",
    operators: Annotated[
        str, typer.Option(help="Users who may submit and stop jobs and drain nodes, separated by commas.")
    ] = "",
    tools: Annotated[
        str, typer.Option(help="Users who may only read states and events, separated by commas.")
    ] = "",
    chaos: Annotated[
        str, typer.Option(help="Operators who may also inject faults, separated by commas.")
    ] = "",
    cluster: Annotated[str, typer.Option(help="Name of the cluster.")] = "ftd",
) -> None:
    """Print an ACL file for mosquitto.

    A node may write only its own topics, and a tool may only read.

    Create a password for each user with mosquitto_passwd, and name both files in mosquitto.conf.

    Example: ftd acl --nodes host-a,host-b --operators alice --tools grafana > ftd.acl
    """
    from ftd.errors import ConfigurationError
    from ftd.transport.mqtt.acl import Users, acl_text

    if not _names(nodes):
        raise ConfigurationError(
            f"{nodes!r} names no node", field="--nodes", remedy="write names such as host-a,host-b"
        )
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
