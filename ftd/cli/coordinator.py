"""``ftd coordinator``: runs the coordinator daemon."""

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from ftd.imports import quick_imports


def coordinator(
    config: Annotated[
        Path | None,
        typer.Option(help="Path of ftd.toml.", show_default="defaults, and a broker on this machine"),
    ] = None,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Remove the job from the journal and the broker; its trainers restart."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also log every committed step.")] = False,
) -> None:
    """Run a coordinator of a cluster.

    It may run on any host that reaches the broker. A second coordinator is a standby and takes over if the
    leader fails.

    You may stop, kill and restart it at any time: training continues without it, and its journal
    (coordinator.state_dir) restores its state.

    Example: ftd coordinator --config /etc/ftd/ftd.toml
    """
    with quick_imports():
        import uvloop

        from ftd.config.daemon import load_daemon_config
        from ftd.coordinator.daemon import CoordinatorDaemon
        from ftd.logs import configure_logs

    loaded = load_daemon_config(config)
    configure_logs(verbose=verbose, daemon="coordinator")
    gc.freeze()
    # A collection over the state of a thousand nodes takes 40 ms.
    gc.set_threshold(100_000, 50, 100)
    # The planning thread must yield to the event loop sooner than after Python's 5 ms.
    sys.setswitchinterval(0.001)

    async def run() -> None:
        await CoordinatorDaemon(loaded, reset=reset).run()

    uvloop.run(run())
