"""``ftd top``: a running cluster in a terminal, as ``ftd local`` shows its own."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import BrokerOption, ClusterOption, ConfigOption, resolve_cluster, run_async

if TYPE_CHECKING:
    from ftd.observe.view.live.view import LiveView
    from ftd.transport.address import ClusterAddress

PAST_EVENTS = 200
PAST_STEPS = 1000


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
) -> None:
    """Watch the cluster live: nodes, pipelines, loss, events.

    It ends with Ctrl-C. Into a pipe, lines, no pictures.

    Example: ftd top --broker mqtt://10.0.0.1:1883
    """
    run_async(_watch(resolve_cluster(broker, cluster, config), once=once))


async def _watch(address: "ClusterAddress", *, once: bool) -> None:
    from rich.console import Console

    from ftd.observe.view.live.view import LiveView
    from ftd.transport.client import ClusterClient

    console = Console()
    view = LiveView(console, lines=not once)
    async with ClusterClient(
        address, listen=True, on_state=view.on_state, on_broker=view.on_broker
    ) as client:
        state = await client.state()
        # Drawn before somebody has answered what was: who may only read waits for an answer in vain.
        with nullcontext() if once else view:
            if state.get("phase") != "UNREACHABLE":
                await _recall(client, view, state.get("job"))
            if once:
                console.print(view.frame())
                return
            async for event in client.events():
                view.on_event(event)


async def _recall(client: Any, view: "LiveView", job: dict[str, Any] | None) -> None:
    """What happened before we came, as far as it is drawn."""
    from ftd.errors import UnreachableError

    try:
        past = await client.history(newest=PAST_EVENTS)
        steps = await client.history(what="steps", newest=PAST_STEPS)
    except UnreachableError:
        return  # The coordinator is away: the retained state has to do.
    for event in past:
        view.replay_event(event)
    for step in steps:
        if job is not None and step["job"] == job["id"]:
            view.replay_event({**step, "event": "StepCommitted"})
