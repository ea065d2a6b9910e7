"""``ftd trace``: records what every rank does in a few steps, and when snapshots are copied."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import ClusterOptions, run_async, with_cluster_options
from ftd.errors import FtdError, UnreachableError
from ftd.observe.view.text import pipeline_name
from ftd.transport.address import ClusterAddress

if TYPE_CHECKING:
    from ftd.transport.wire.public import TraceData

FORMATS = (".json", ".png", ".svg")
_MOST_STEPS = 1000
_LEAD_S = 0.5
"""Time between the request and the first step, so that all ranks begin with the same step."""


@with_cluster_options
def trace(
    steps: Annotated[int, typer.Option(min=1, max=_MOST_STEPS, help="Number of steps to record.")] = 5,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            help="File to write: .json (Chrome's trace events, for ui.perfetto.dev), .png or .svg; may be "
            "repeated.",
            show_default="trace.json",
        ),
    ] = None,
    within: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Fail if the steps take more than this many seconds.")
    ] = 60.0,
    *,
    where: ClusterOptions,
) -> None:
    """Record what every rank does in the next steps.

    The trace shows when a rank computes, when it waits, and when snapshots are copied.

    Training continues meanwhile. The exit code is 1 if no job is training or a rank does not train the steps in time,
    and 3 if the broker, the coordinator or a node does not answer.

    Example: ftd trace --steps 5 --out trace.json --out trace.png
    """
    from ftd.observe.view.files import require_distinct, require_format, write_file
    from ftd.observe.view.plots.trace_plot import copied_line, plot_trace
    from ftd.observe.view.trace import align_traces, chrome_trace

    places = out or [Path("trace.json")]
    for path in places:
        require_format(path, FORMATS, "--out")
    require_distinct(*(("--out", path) for path in places))
    address = where.resolve()
    state, found = run_async(request_traces(address, steps, within))
    rows = align_traces(found, _places(state))
    name = str((state.get("job") or {}).get("name") or address.cluster)
    for path in places:
        if path.suffix.lower() == ".json":
            write_file(path, chrome_trace(rows, name=name).encode(), "--out")
        else:
            plot_trace(rows, path, name=name)
    spans, dropped = sum(len(row.spans) for row in rows), sum(row.dropped for row in rows)
    typer.echo(f"{spans} spans of {len(rows)} ranks, {copied_line(rows)}")
    if dropped:
        typer.echo(f"ftd: {dropped} spans did not fit and were dropped; record fewer --steps", err=True)
    typer.echo(f"wrote {', '.join(map(str, places))}")


async def request_traces(
    address: ClusterAddress, steps: int, within_s: float
) -> tuple[dict[str, Any], list["TraceData"]]:
    """Return the state of the cluster and every rank's trace.

    :raises FtdError: no job is training.
    :raises RequestRejected: a node rejects the request.
    :raises UnreachableError: the broker, the coordinator or a node does not answer.
    """
    import msgspec

    from ftd.transport.client import ClusterClient
    from ftd.transport.wire.public import TraceData, TraceRequest

    async with ClusterClient(address) as client:
        state = await client.state()
        keys = (key.rpartition("/") for key in _places(state))
        devices = [(name, int(index)) for name, _, index in keys]
        if state.get("phase") == "UNREACHABLE":
            why = state.get("reason") or "it is gone"
            raise UnreachableError(
                f"no coordinator says which ranks there are: {why}; training continues without it"
            )
        if state.get("phase") != "RUNNING" or not devices:
            raise FtdError(f"no job is training (the cluster is {state.get('phase', 'unknown')})")
        ahead = 1 + int(_LEAD_S / step_s) if (step_s := float(state.get("step_s") or 0.0)) > 0 else 1
        first_step = int(state.get("step") or 0) + 1 + ahead

        async def one(node: str, device: int) -> "TraceData":
            request = TraceRequest(
                **client.envelope(),
                device=device,
                first_step=first_step,
                steps=steps,
                within_s=within_s,
            )
            answer = await client.request(
                request, topic=client.topics.trace(node), timeout_s=within_s + _LEAD_S + 5.0
            )
            try:
                return msgspec.convert(answer.data, TraceData)
            except msgspec.ValidationError as error:
                raise FtdError(f"the answer of {node} is not a trace: {error}") from None

        return state, list(await asyncio.gather(*(one(node, device) for node, device in devices)))


def _places(state: dict[str, Any]) -> dict[str, str]:
    """Return the position in the plan of each ``node/device``."""
    return {
        str(device): f"pipeline {pipeline_name(number)}, stage {index + 1}"
        for number, pipeline in enumerate(state.get("pipelines") or ())
        for index, stage in enumerate(pipeline["stages"])
        for device in stage["devices"]
    }
