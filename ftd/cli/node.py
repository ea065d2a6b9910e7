"""``ftd node``: runs the node daemon."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from ftd.imports import quick_imports


def node(
    config: Annotated[Path, typer.Option(help="Path of this host's ftd.toml.")],
    snapshots_only: Annotated[
        bool,
        typer.Option("--snapshots-only", help="Only hold the snapshots of scripts that use Snapshotter."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more details.")] = False,
) -> None:
    """Offer this host's devices to a cluster.

    Run one node per host. SIGTERM makes it leave gracefully: the others continue without it after the next
    step boundary. A second SIGTERM ends it at once. The exit code is 2 if the configuration is wrong.

    With --snapshots-only, it is the snapshot agent of this host's scripts: it protects their snapshots across
    hosts (docs/tutorials/snapshotter.md) and needs neither a broker nor a coordinator.

    Example: ftd node --config /etc/ftd/ftd.toml
    """
    with quick_imports():
        import uvloop

        from ftd.config.daemon import load_daemon_config
        from ftd.logs import configure_logs
        from ftd.node.daemon import NodeDaemon
        from ftd.snapshots.snapshot_agent.daemon import SnapshotAgentDaemon
    gc.freeze()

    loaded = load_daemon_config(config)
    configure_logs(verbose=verbose, daemon="node", node=loaded.node)

    async def run() -> int:
        return await (SnapshotAgentDaemon(loaded) if snapshots_only else NodeDaemon(loaded)).run()

    raise typer.Exit(uvloop.run(run()))
