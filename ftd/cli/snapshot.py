"""``ftd snapshot``: one now, another interval, another protection, for the job under way."""

from typing import Annotated, Any

import typer

from ftd.cli.client import send_request
from ftd.cli.options import BrokerOption, ClusterOption, ConfigOption, JsonOption, print_json, resolve_cluster
from ftd.errors import ConfigurationError
from ftd.transport.address import ClusterAddress

snapshot = typer.Typer(no_args_is_help=True, help="Snapshots in the nodes' memory, of the job under way.")


def register(app: typer.Typer) -> None:
    app.add_typer(snapshot, name="snapshot")


@snapshot.command("now")
def now(
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a snapshot behind the step in flight.

    ftd status shows when it is complete.

    Example: ftd snapshot now
    """
    _request(resolve_cluster(broker, cluster, config), as_json, now=True)


@snapshot.command("every")
def every(
    interval: Annotated[
        str, typer.Argument(help="Steps from one to the next; auto: as they cost; 0: none.", metavar="N|auto")
    ],
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take snapshots so often from now on.

    A coordinator that restarts keeps to it.

    Example: ftd snapshot every auto
    """
    written = interval.strip().lower()
    if written != "auto" and not (written.isascii() and written.isdecimal()):
        raise ConfigurationError(
            f"{interval!r} is no interval",
            field="every",
            remedy="write a number of steps, auto, or 0 for none",
        )
    steps = "auto" if written == "auto" else int(written)
    _request(resolve_cluster(broker, cluster, config), as_json, every_steps=steps)


@snapshot.command("protect")
def protect(
    scheme: Annotated[
        str,
        typer.Argument(help="none, arc:k, aec, aec2, joined by +; auto.", metavar="SCHEME|auto"),
    ],
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Protect snapshots so from now on.

    It begins at the next step boundary; nothing is computed again and nothing moves.

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
