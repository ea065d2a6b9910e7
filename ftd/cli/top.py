"""``ftd top``: shows a running cluster in a terminal, with the live view of ``ftd local``."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import ClusterOptions, run_async, text_console, with_cluster_options

if TYPE_CHECKING:
    from ftd.observe.view.live.view import LiveView
    from ftd.transport.address import ClusterAddress

PAST_EVENTS = 200
PAST_STEPS = 1000


@with_cluster_options
def top(
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
    *,
    where: ClusterOptions,
) -> None:
    """Show the cluster live: nodes, pipelines, loss, events.

    Press Ctrl-C to exit. If the output is a pipe, events are printed as lines.

    Example: ftd top --broker mqtt://10.0.0.1:1883
    """
    run_async(_watch(where.resolve(), once=once))


async def _watch(address: "ClusterAddress", *, once: bool) -> None:
    from ftd.observe.view.live.view import LiveView
    from ftd.transport.client import ClusterClient

    console = text_console()
    view = LiveView(console, lines=not once)
    async with ClusterClient(
        address, listen=True, on_state=view.on_state, on_broker=view.on_broker
    ) as client:
        state = await client.state()
        # Draw before the history arrives: a user with read access only never receives an answer.
        with nullcontext() if once else view:
            if state.get("phase") != "UNREACHABLE":
                await _recall(client, view, state.get("job"))
            if once:
                console.print(view.frame())
                return
            async for event in client.events():
                view.on_event(event)


async def _recall(client: Any, view: "LiveView", job: dict[str, Any] | None) -> None:
    """Show what happened before the command started, as far as it is drawn."""
    from ftd.errors import UnreachableError

    try:
        past = await client.history(newest=PAST_EVENTS)
        steps = await client.history(what="steps", newest=PAST_STEPS)
    except UnreachableError:
        return  # The coordinator does not answer: show only the retained state.
    for event in past:
        view.replay_event(event)
    for step in steps:
        if job is not None and step["job"] == job["id"]:
            view.replay_event({**step, "event": "StepCommitted"})
