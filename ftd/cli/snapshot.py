"""``ftd snapshot``: takes snapshots of the running job, and changes their interval and protection."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ftd.cli.client import change_cluster
from ftd.cli.options import (
    ClusterOptions,
    JsonOption,
    with_cluster_options,
)
from ftd.errors import ConfigurationError

group = typer.Typer(
    name="snapshot", no_args_is_help=True, help="Take and configure the running job's snapshots."
)


@group.command("now")
@with_cluster_options
def now(*, where: ClusterOptions, as_json: JsonOption = False) -> None:
    """Take a snapshot after the step in flight.

    The command ends when the snapshot is complete.

    If no snapshot can be taken, nothing changes, and the exit code is 1.

    Example: ftd snapshot now
    """
    _request(where, {"now": True}, as_json=as_json, with_outcome=True)


@group.command("every")
@with_cluster_options
def every(
    interval: Annotated[
        str,
        typer.Argument(
            help="Steps between snapshots; auto: chosen by their cost; 0: no snapshots.", metavar="N|auto"
        ),
    ],
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Change the interval of snapshots.

    The new interval also survives a restart of the coordinator.

    Example: ftd snapshot every auto
    """
    written = interval.strip().lower()
    if written != "auto" and not re.fullmatch(r"[0-9]{1,18}", written):
        raise ConfigurationError(
            f"{interval!r} is not an interval",
            field="every",
            remedy="write a number of steps, auto, or 0 for no snapshots",
        )
    steps = "auto" if written == "auto" else int(written)
    _request(where, {"every_steps": steps}, as_json=as_json)


@group.command("protect")
@with_cluster_options
def protect(
    scheme: Annotated[
        str,
        typer.Argument(help="Scheme: none, arc:k, aec, aec2, joined by +, or auto.", metavar="SCHEME|auto"),
    ],
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Change the protection of snapshots.

    It changes at the next step boundary; no step is computed again and no state moves.

    Example: ftd snapshot protect aec2
    """
    _request(where, {"protection": scheme.strip().lower()}, as_json=as_json)


def _request(
    where: ClusterOptions, asked: Mapping[str, Any], *, as_json: bool, with_outcome: bool = False
) -> None:
    from ftd.transport.wire.public import SnapshotRequest

    change_cluster(where, SnapshotRequest, asked, as_json=as_json, shown={}, with_outcome=with_outcome)
