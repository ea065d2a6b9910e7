"""``ftd snapshot``: takes snapshots of the running job, and changes their interval and protection."""

from typing import Annotated, Any

import typer

from ftd.cli.client import ask, send_request
from ftd.cli.options import (
    BrokerOption,
    ClusterOption,
    ConfigOption,
    JsonOption,
    print_cluster,
    print_json,
    resolve_cluster,
)
from ftd.errors import ConfigurationError, RequestRejected
from ftd.transport.address import ClusterAddress

snapshot = typer.Typer(no_args_is_help=True, help="Take and configure the running job's snapshots.")


def register(app: typer.Typer) -> None:
    app.add_typer(snapshot, name="snapshot")


@snapshot.command("now")
def now(
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a snapshot after the step in flight.

    The command ends when the snapshot is complete.

    If no snapshot can be taken, nothing changes, and the exit code is 1.

    Example: ftd snapshot now
    """
    from ftd.transport.wire.public import SnapshotRequest

    address = resolve_cluster(broker, cluster, config)
    print_cluster(address)
    try:
        answer = ask(address, SnapshotRequest, now=True)
    except RequestRejected as error:
        if as_json:
            print_json({"outcome": "refused", "detail": str(error), "cluster": address.cluster})
        raise
    if as_json:
        print_json({"outcome": answer.outcome, "detail": answer.detail, "cluster": address.cluster})
    else:
        typer.echo(answer.detail)


@snapshot.command("every")
def every(
    interval: Annotated[
        str,
        typer.Argument(
            help="Steps between snapshots; auto: chosen by their cost; 0: no snapshots.", metavar="N|auto"
        ),
    ],
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the interval of snapshots.

    The new interval also survives a restart of the coordinator.

    Example: ftd snapshot every auto
    """
    written = interval.strip().lower()
    if written != "auto" and not (written.isascii() and written.isdecimal()):
        raise ConfigurationError(
            f"{interval!r} is not an interval",
            field="every",
            remedy="write a number of steps, auto, or 0 for no snapshots",
        )
    steps = "auto" if written == "auto" else int(written)
    _request(resolve_cluster(broker, cluster, config), as_json, every_steps=steps)


@snapshot.command("protect")
def protect(
    scheme: Annotated[
        str,
        typer.Argument(help="Scheme: none, arc:k, aec, aec2, joined by +, or auto.", metavar="SCHEME|auto"),
    ],
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the protection of snapshots.

    It changes at the next step boundary; no step is computed again and no state moves.

    Example: ftd snapshot protect aec2
    """
    _request(resolve_cluster(broker, cluster, config), as_json, protection=scheme.strip().lower())


def _request(address: ClusterAddress, as_json: bool, **fields: Any) -> None:
    from ftd.transport.wire.public import SnapshotRequest

    detail = send_request(address, SnapshotRequest, **fields)
    if as_json:
        print_json({"detail": detail, "cluster": address.cluster})
    else:
        typer.echo(detail)
