"""``ftd coordinator``: the daemon."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("coordinator")(coordinator)


def coordinator(
    config: Annotated[
        Path | None, typer.Option(help="ftd.toml; without it, the defaults and a broker on this machine.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Forget the job, here and at the broker; its trainers start over.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every committed step, too.")] = False,
) -> None:
    """Run the coordinator of a cluster, or its standby.

    It may run anywhere that reaches the broker; a second one stands by and takes over.

    It may be stopped, killed and started again at any time: training continues without it, and its journal
    (coordinator.state_dir) tells it what it knew.

    Example: ftd coordinator --config /etc/ftd/ftd.toml
    """
    import gc
    import sys

    import uvloop

    from ftd.config.daemon import load_daemon_config
    from ftd.coordinator.daemon import CoordinatorDaemon
    from ftd.logs import configure_logs

    loaded = load_daemon_config(config)
    configure_logs(verbose=verbose, daemon="coordinator")
    # What is loaded stays; and a look through all that is known of a thousand nodes takes 40 ms.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    # The planning thread must give way to the event loop sooner than Python's 5 ms.
    sys.setswitchinterval(0.001)

    async def run() -> None:
        await CoordinatorDaemon(loaded, reset=reset).run()

    uvloop.run(run())
