"""``ftd trace``: what every rank did in a few steps, and where the copies of snapshots fell."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import BrokerOption, ClusterOption, ConfigOption, resolve_cluster, run_async
from ftd.errors import ConfigurationError, FtdError
from ftd.observe.view.text import pipeline_name
from ftd.transport.address import ClusterAddress

if TYPE_CHECKING:
    from ftd.transport.wire.public import TraceData

FORMATS = (".json", ".png", ".svg")
_MOST_STEPS = 1000
_LEAD_S = 0.5
"""Asked for in time, all ranks begin with the same step."""


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)


def trace(
    steps: Annotated[int, typer.Option(min=1, max=_MOST_STEPS, help="Record so many steps.")] = 5,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            help="Where to: .json (Chrome's trace events, for ui.perfetto.dev), .png or .svg; may be given "
            "several times. Default: trace.json",
        ),
    ] = None,
    within: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Give up when the steps take longer, in seconds.")
    ] = 60.0,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
) -> None:
    """Record what every rank does in the next steps.

    When it computes, when it waits, and when snapshots are copied.

    Training goes on meanwhile. Exit code 1 when nothing is training, or a rank did not answer.

    Example: ftd trace --steps 5 --out trace.json --out trace.png
    """
    from ftd.observe.view.plots.trace_plot import copied_line, plot_trace
    from ftd.observe.view.trace import align_traces, chrome_trace

    places = out or [Path("trace.json")]
    for path in places:
        _check(path)
    address = resolve_cluster(broker, cluster, config)
    state, found = run_async(request_traces(address, steps, within))
    rows = align_traces(found, _places(state))
    name = str((state.get("job") or {}).get("name") or address.cluster)
    for path in places:
        if path.suffix.lower() == ".json":
            try:
                path.write_text(chrome_trace(rows, name=name), encoding="utf-8")
            except OSError as error:
                raise ConfigurationError(f"cannot write {path}: {error.strerror}", field="--out") from None
        else:
            plot_trace(rows, path, name=name)
    spans, dropped = sum(len(row.spans) for row in rows), sum(row.dropped for row in rows)
    typer.echo(f"{spans} spans of {len(rows)} ranks, {copied_line(rows)}")
    if dropped:
        typer.echo(f"ftd: {dropped} spans did not fit and are left out; trace fewer --steps", err=True)
    typer.echo(f"written to {', '.join(map(str, places))}")


def _check(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(
            f"{path} has none of the suffixes {', '.join(FORMATS)}",
            field="--out",
            remedy="give trace.json, trace.png or trace.svg",
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"{path.parent} is no directory", field="--out", remedy="make it, or choose another place"
        )


async def request_traces(
    address: ClusterAddress, steps: int, within_s: float
) -> tuple[dict[str, Any], list["TraceData"]]:
    """The cluster's state and every rank's answer.

    :raises FtdError: nothing is training. :raises RequestRejected: a node says no. :raises Unreachable: one
        says nothing.
    """
    import msgspec

    from ftd.transport.client import ClusterClient
    from ftd.transport.wire.public import TraceData, TraceRequest

    async with ClusterClient(address) as client:
        state = await client.state()
        devices = _devices(state)
        if state.get("phase") != "RUNNING" or not devices:
            raise FtdError(f"nothing is training (the cluster is {state.get('phase', 'unknown')})")
        ahead = 1 + int(_LEAD_S / step_s) if (step_s := float(state.get("step_s") or 0.0)) > 0 else 1
        first_step = int(state.get("step") or 0) + 1 + ahead

        async def one(node: str, device: int) -> "TraceData":
            envelope = client.envelope()
            request = TraceRequest(
                request=envelope["request"],
                reply=envelope["reply"],
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
                raise FtdError(f"{node} answered something that is no trace: {error}") from None

        return state, list(await asyncio.gather(*(one(node, device) for node, device in devices)))


def _places(state: dict[str, Any]) -> dict[str, str]:
    """``node/device`` → where it is in the plan."""
    return {
        str(device): f"pipeline {pipeline_name(number)}, stage {index + 1}"
        for number, pipeline in enumerate(state.get("pipelines") or ())
        for index, stage in enumerate(pipeline["stages"])
        for device in stage["devices"]
    }


def _devices(state: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, int(index)) for name, _, index in (key.rpartition("/") for key in _places(state))]
