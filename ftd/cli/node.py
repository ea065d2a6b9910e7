"""``ftd node``: the daemon."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("node")(node)


def node(
    config: Annotated[Path, typer.Option(help="ftd.toml of this host.")],
    snapshots_only: Annotated[
        bool, typer.Option("--snapshots-only", help="Only keep the snapshots of scripts (Snapshotter).")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Offer this host's devices to a cluster; one runs per host.

    SIGTERM leaves gracefully: the others go on without this node at the next step boundary. A second
    SIGTERM does not wait for that. Exit code 2 when the configuration is wrong.

    With --snapshots-only it is the keeper of this host's scripts instead, which protects their snapshots
    among hosts (docs/tutorials/snapshotter.md): it needs neither broker nor coordinator.

    Example: ftd node --config /etc/ftd/ftd.toml
    """
    import uvloop

    from ftd.config.daemon import load_daemon_config
    from ftd.logs import configure_logs
    from ftd.node.daemon import NodeDaemon
    from ftd.snapshots.snapshot_agent.daemon import SnapshotAgentDaemon

    loaded = load_daemon_config(config)
    configure_logs(verbose=verbose, daemon="node", node=loaded.node)

    async def run() -> int:
        return await (SnapshotAgentDaemon(loaded) if snapshots_only else NodeDaemon(loaded)).run()

    raise typer.Exit(uvloop.run(run()))
