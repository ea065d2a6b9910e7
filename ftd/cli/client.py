"""Commands for a running cluster: submit, status, events, story, drain, stop."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import (
    ClusterOptions,
    JsonOption,
    NodeArgument,
    print_cluster,
    print_json,
    print_rich,
    run_async,
    with_cluster_options,
)
from ftd.errors import ConfigurationError, FtdError, RequestRejected, UnreachableError
from ftd.transport.address import ClusterAddress

if TYPE_CHECKING:
    from ftd.transport.wire.public import Answer


@with_cluster_options
def submit(
    job: Annotated[Path, typer.Argument(help="Job file.", metavar="JOB.toml")],
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead of the file's.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job ends; exit code 1 unless it finished.")
    ] = False,
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Submit a job to a cluster and print the job's id.

    Training starts as soon as enough nodes are available.

    The training script must be under the same path on every node.

    Example: ftd submit examples/gpt.toml --broker mqtt://10.0.0.1:1883
    """
    from ftd.config.job import load_job_data
    from ftd.transport.wire.public import SubmitRequest

    data = load_job_data(job, steps=steps)
    address = where.resolve()
    print_cluster(address)
    job_id = ask(address, SubmitRequest, job=data).detail
    if as_json:
        print_json({"job": job_id, "cluster": address.cluster})
    else:
        typer.echo(job_id)
    if wait:
        outcome = run_async(_await_end(address, job_id))
        typer.echo(f"ftd: {outcome['text']}", err=True)
        raise typer.Exit(0 if outcome["finished"] else 1)


@with_cluster_options
def status(*, where: ClusterOptions, as_json: JsonOption = False) -> None:
    """Show phase, job, nodes and pipelines of the cluster.

    The exit code is 3 if its coordinator is unreachable.

    Example: ftd status --json | jq .phase
    """
    from ftd.transport.client import ClusterClient

    address = where.resolve()

    async def ask() -> dict[str, Any]:
        async with ClusterClient(address) as client:
            return await client.state()

    state = run_async(ask())
    if as_json:
        print_json(state)
    else:
        from ftd.observe.view.status import render_status

        print_rich(render_status(state))
    if state.get("phase") == "UNREACHABLE":
        raise UnreachableError(
            f"{state.get('reason', 'the coordinator does not answer')}; training continues without it"
        )


@with_cluster_options
def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events as they happen.")
    ] = False,
    last: Annotated[int, typer.Option(min=0, help="Number of past events to print.")] = 50,
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Print events: joins, failures, plans, recoveries.

    Past events are those in the coordinator's journal except committed steps, which ftd report has. With
    --follow, steps are printed as they are committed. With --json, each line is one object.

    Example: ftd events --follow
    """
    address = where.resolve()
    run_async(_events(address, follow=follow, last=last, as_json=as_json))


@with_cluster_options
def story(
    of: Annotated[
        str,
        typer.Argument(
            help="Name of a node, generation of a recovery, or the file of a report.",
            metavar="NODE|GENERATION|REPORT.json",
        ),
    ],
    within: Annotated[
        str | None,
        typer.Argument(
            help="With the file of a report: the node or the generation; without it, everything.",
            metavar="NODE|GENERATION",
        ),
    ] = None,
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Explain what happened to a node or in a recovery.

    Sentences lead from cause to effect and say how long each part took.

    The exit code is 1 if the node or the generation is unknown. ftd status shows the current generation.

    A report's file has the events of its run, so this works after the cluster is gone.

    Example: ftd story node-2, or ftd story report.json node-2
    """
    from ftd.observe.view.files import read_report
    from ftd.observe.view.story import chapters, render_story

    if of.endswith(".json"):
        past: list[dict[str, Any]] = list(read_report(Path(of), "NODE|GENERATION|REPORT.json").events)
        if within is None:
            if as_json:
                print_json({"chapters": chapters(past)})
            else:
                print_rich(render_story(past))
            return
        of = within
    elif within is not None:
        raise ConfigurationError(
            f"{within!r} is given after {of!r}, which is not the file of a report",
            field="NODE|GENERATION",
            remedy="name one node or generation, or the .json file of a report before it",
        )
    else:
        past = run_async(_past(where.resolve()))
    found = chapters(past, of)
    if not found and re.fullmatch(r"[0-9]{1,18}", of):
        _print_recovery(past, int(of), as_json=as_json)
        return
    if not found:
        known = sorted({str(event["node"]) for event in past if event.get("node")})
        raise FtdError(f"no event names a node {of!r} (known nodes: {', '.join(known) or 'none'})")
    if as_json:
        print_json({"node": of, "chapters": found})
    else:
        print_rich(render_story(past, of))


async def _past(address: ClusterAddress) -> list[dict[str, Any]]:
    """Return all events of the journal in their order, whichever hosts the coordinators were on."""
    from ftd.observe.view.history import on_one_clock
    from ftd.transport.client import ClusterClient

    async with ClusterClient(address) as client:
        return list(on_one_clock(await client.history()))


def _print_recovery(past: list[dict[str, Any]], generation: int, *, as_json: bool) -> None:
    from ftd.observe.view.history import find_recovery
    from ftd.observe.view.sentences import describe_recovery

    report, recovery = find_recovery(generation, past)
    sentences = describe_recovery(recovery, report)
    if as_json:
        print_json({"generation": generation, "sentences": sentences})
    else:
        typer.echo("\n".join(sentences))


@with_cluster_options
def drain(
    node: NodeArgument,
    when_possible: Annotated[
        bool,
        typer.Option(
            "--when-possible", help="If there is no plan without the node, wait until there is one."
        ),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the drain of the node, so that it stays.")
    ] = False,
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Take a node out of training; no step is lost.

    The planner is asked first. If the other nodes have a plan, the node leaves after the step in flight.
    Otherwise nothing changes, and the exit code is 1.

    Example: ftd drain node-2 --when-possible
    """
    from ftd.transport.wire.public import DrainRequest

    if when_possible and cancel:
        raise ConfigurationError("--when-possible and --cancel exclude each other", remedy="use one of both")
    asked = {"node": node, "when_possible": when_possible, "cancel": cancel}
    change_cluster(where, DrainRequest, asked, as_json=as_json, shown={"node": node}, with_outcome=True)


@with_cluster_options
def readmit(
    node: NodeArgument,
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Let a node that was set aside take part in training again.

    A node that fails repeatedly for the same reason is set aside; ftd status shows it, and the reason.

    Example: ftd readmit node-2
    """
    from ftd.transport.wire.public import ReadmitRequest

    change_cluster(where, ReadmitRequest, {"node": node}, as_json=as_json, shown={"node": node})


@with_cluster_options
def stop(
    job: Annotated[str, typer.Argument(help="Id or name of the job.", metavar="JOB")],
    *,
    where: ClusterOptions,
    as_json: JsonOption = False,
) -> None:
    """Stop a job: its trainers end, the nodes stay.

    Example: ftd stop gpt
    """
    from ftd.transport.wire.public import StopRequest

    change_cluster(where, StopRequest, {"job": job}, as_json=as_json, shown={"job": job})


def change_cluster(
    where: ClusterOptions,
    kind: Any,
    asked: Mapping[str, Any],
    *,
    as_json: bool,
    shown: Mapping[str, str],
    with_outcome: bool = False,
) -> None:
    """Print the cluster, send it one request that changes it, and print the answer.

    :param asked: fields of the request.
    :param shown: fields of the JSON besides the cluster and the answer's detail.
    :param with_outcome: the JSON has the outcome, and is also printed if the request is rejected.
    :raises RequestRejected: the cluster rejects the request.
    :raises UnreachableError: the cluster does not answer.
    """
    address = where.resolve()
    print_cluster(address)
    document = {**shown, "cluster": address.cluster}
    try:
        answer = ask(address, kind, **asked)
    except RequestRejected as error:
        if as_json and with_outcome:
            print_json({**document, "outcome": "refused", "detail": str(error)})
        raise
    if as_json:
        outcome = {"outcome": answer.outcome} if with_outcome else {}
        print_json({**document, **outcome, "detail": answer.detail})
    else:
        typer.echo(answer.detail)


def ask(address: ClusterAddress, kind: Any, **fields: Any) -> "Answer":
    """Send a request to the cluster and return its answer.

    :raises RequestRejected: the cluster rejects the request.
    :raises UnreachableError: the cluster does not answer.
    """
    from ftd.transport.client import ClusterClient

    async def request() -> "Answer":
        async with ClusterClient(address) as client:
            return await client.request(kind(**client.envelope(), **fields))

    return run_async(request())


async def _await_end(address: ClusterAddress, job_id: str) -> dict[str, Any]:
    """Wait for the end of the job; return ``finished`` (all its steps are done) and ``text``.

    The retained state is sufficient and needs no connection that lasts for days: a client that reconnects
    receives it again. If another job has started meanwhile, the outcome stays unknown.
    """
    from asyncio import Queue

    from ftd.observe.view.text import waiting_words
    from ftd.transport.client import ClusterClient

    states: Queue[dict[str, Any]] = Queue()
    seen, printed = False, ""
    async with ClusterClient(address, on_state=states.put_nowait):
        while True:
            state = await states.get()
            job = state.get("job")
            seen = seen or (job is not None and job["id"] == job_id)
            if job is None or not seen:
                continue  # No coordinator is connected, or the state is older than the job.
            if job["id"] != job_id:
                return {"finished": False, "text": f"{job_id} has ended, and {job['id']} is running now"}
            waiting = waiting_words(state) if state["phase"] == "WAITING" else ""
            if waiting not in ("", printed):
                typer.echo(f"ftd: {waiting}", err=True)
                printed = waiting
            if state["phase"] in ("FINISHED", "FAILED"):
                finished = state["phase"] == "FINISHED" and state["step"] >= job["steps"]
                return {"finished": finished, "text": state["outcome"]}


async def _events(address: ClusterAddress, *, follow: bool, last: int, as_json: bool) -> None:
    """Print the end of the journal, then live events; an event in both is printed once."""
    from ftd.transport.client import ClusterClient

    away = False

    def on_broker(there: bool) -> None:
        nonlocal away
        if away or not there:
            typer.echo(f"ftd: the broker is {'back' if there else 'unreachable; retrying'}", err=True)
        away = not there

    async with ClusterClient(address, listen=follow, on_broker=on_broker) as client:
        past: list[dict[str, Any]] = []
        try:
            past = await client.history(newest=last) if last else []
        except UnreachableError:
            if not follow:
                raise
            typer.echo("ftd: no coordinator answers; showing only new events", err=True)
        for event in past:
            _print_event(event, as_json)
        if not follow:
            return
        printed = {_identity(event) for event in past}
        async for event in client.events():
            if _identity(event) not in printed:
                _print_event(event, as_json)


def _identity(event: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(event.get(name) for name in ("monotonic", "event", "node", "step", "cause"))


def _print_event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(event)
        return
    from ftd.observe.view.lines import plain_event

    typer.echo(plain_event(event))
