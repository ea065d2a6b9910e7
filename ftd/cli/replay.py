"""``ftd replay``: replays an availability trace under every recovery policy, in virtual time."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ftd.cli.options import (
    CheckpointingOption,
    DevicesOption,
    JsonOption,
    ProfileOption,
    TolerateOption,
    print_rich,
)
from ftd.errors import ConfigurationError

if TYPE_CHECKING:
    from ftd.replay.comparison import Comparison
    from ftd.replay.job import ReplayJob
    from ftd.replay.parameters import Parameters
    from ftd.replay.policies.registry import ThroughputSource
    from ftd.replay.traces.generate import FailureModel
    from ftd.replay.traces.trace import Trace

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|d)")
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def _print_names(requested: bool) -> None:
    if not requested:
        return
    from ftd.replay.cards import card_names, load_card
    from ftd.replay.policies.registry import POLICIES
    from ftd.replay.traces.reading import FORMATS

    typer.echo("model cards:")
    for name in card_names():
        typer.echo(f"  {name:<16}{load_card(name).title}")
    typer.echo(f"policies: {', '.join(POLICIES)}")
    typer.echo(f"formats of traces: {', '.join(FORMATS)}")
    raise typer.Exit


def replay(
    job: Annotated[
        str,
        typer.Argument(
            help="Name of a model card, a profile of ftd profile (.json), or a job file (.toml).",
            metavar="JOB",
        ),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="Replay this availability trace (docs/reference/traces.md).")
    ] = None,
    failures: Annotated[
        Path | None, typer.Option(help="Generate traces from this failure model.", metavar="MODEL.toml")
    ] = None,
    trace_format: Annotated[
        str | None,
        typer.Option("--format", help="With --trace: format of the file.", show_default="recognised"),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="With --trace: the system of a lanl file whose failures to replay.")
    ] = None,
    max_gap: Annotated[
        str | None,
        typer.Option(
            help="With --trace: reject a file with a longer span without records, such as 6h.",
            metavar="DURATION",
            show_default="a long span is noted",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="With --failures: number of nodes, instead of the model's. With --trace: number of all nodes, for "
            "formats that record failures only.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Length of the replay, such as 90min, 12h or 30d.",
            metavar="DURATION",
            show_default="to the trace's end",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Replay this policy; may be repeated. See --list.", show_default="all"),
    ] = None,
    throughput: Annotated[
        Literal["common", "published"],
        typer.Option(
            help="Throughput without failures: that of the job's best plan for every policy, or for each system the "
            "published one of the model card."
        ),
    ] = "common",
    parameters: Annotated[
        Path | None,
        typer.Option(
            help="Use these parameters of policies instead of those that ship.", metavar="FILE.toml"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --failures: seed of the first trace; each next one has the next seed.",
            show_default="0",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --failures: at most this many traces. Fewer are enough if the confidence intervals are narrow.",
            show_default="200",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a node for an hour: also show what samples cost.")
    ] = None,
    profile: ProfileOption = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step, instead of the job's; a profile needs it.")
    ] = None,
    tolerate: TolerateOption = None,
    gpus_per_node: DevicesOption = None,
    activation_checkpointing: CheckpointingOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw throughput over time and where the time went; .html is a whole page.",
            metavar="FILE.png|FILE.svg|FILE.html",
        ),
    ] = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="Instead of comparing policies, advise how ftd should be set: failures to tolerate, protection, "
            "intervals of snapshots and checkpoints, spare nodes.",
        ),
    ] = False,
    as_json: JsonOption = False,
    show_names: Annotated[
        bool,
        typer.Option(
            "--list",
            callback=_print_names,
            is_eager=True,
            help="List model cards, policies and formats, and exit.",
        ),
    ] = False,
) -> None:
    """Estimate what failures cost under each recovery policy.

    Nodes come and go as an availability trace says, or as a failure model generates them. The replay runs in
    virtual time: ftd with its real planner, other systems as cost models. It shows what each policy commits,
    its goodput, and where the time went. Everything is simulated; nothing is trained.

    Example: ftd replay gpt2 --trace benchmarks/traces/oobleck_fail_1h.csv --plot gpt2.html
    """
    from ftd.replay.parameters import read_parameters
    from ftd.replay.policies.registry import POLICIES, require_policies
    from ftd.replay.report import build_report
    from ftd.replay.sources import load_replay_job
    from ftd.replay.tables import render_replay
    from ftd.transport.wire.public import encode_document

    if (trace is None) == (failures is None):
        raise ConfigurationError(
            "a replay needs either a trace or a failure model",
            field="--trace",
            remedy="give --trace FILE or --failures MODEL.toml",
        )
    of_trace = {"--format": trace_format, "--system": system, "--max-gap": max_gap}
    of_failures = {"--seed": seed, "--repeat": repeat}
    needed, misplaced = ("--failures", of_failures) if failures is None else ("--trace", of_trace)
    _reject(misplaced, f"it belongs to {needed}", "leave it out")
    if price is not None and not 0 < price < float("inf"):
        raise ConfigurationError(f"{price} is not a price", field="--price", remedy="write a number above 0")
    if advise:
        published = None if throughput == "common" else throughput
        of_comparison = {"--policy": policy, "--plot": plot, "--price": price, "--throughput": published}
        _reject(
            {**of_comparison, "--tolerate": tolerate},
            "advice replays the policy ftd with varied settings",
            "leave it out with --advise",
        )
    until_s = None if until is None else _parse_duration(until, "--until")
    max_gap_s = None if max_gap is None else _parse_duration(max_gap, "--max-gap")
    policies = tuple(policy or POLICIES)
    require_policies(policies)
    if plot is not None:
        from ftd.observe.view.files import require_format
        from ftd.replay.plot import FORMATS

        require_format(plot, FORMATS, "--plot")
    known = read_parameters(parameters)
    source: Trace | FailureModel
    if trace is not None:
        source = _read_trace(trace, trace_format, system, nodes, max_gap_s, until_s)
        most_nodes = source.most_nodes
    else:
        assert failures is not None, "one of the two was given"
        source = _read_failures(failures, nodes, until_s)
        most_nodes = source.nodes
    loaded = load_replay_job(
        job,
        most_nodes,
        profile=profile,
        global_batch=global_batch,
        tolerate=tolerate,
        devices_per_node=gpus_per_node,
        activation_checkpointing=activation_checkpointing,
    )
    if advise:
        _advise(loaded, source, known, seed or 0, repeat, as_json=as_json)
        return
    comparison = _compare(
        loaded,
        source,
        known,
        policies,
        throughput,
        seed or 0,
        repeat,
    )
    report = build_report(
        comparison,
        generated=failures is not None,
        parameters="those that ship with ftd" if parameters is None else f"those of {parameters.name}",
        price_per_node_hour=price,
    )
    if plot is not None:
        from ftd.replay.plot import plot_replay

        plot_replay(report, plot)
    if as_json:
        typer.echo(encode_document(report).decode().rstrip())
    else:
        print_rich(render_replay(report))


def _reject(options: Mapping[str, object], problem: str, remedy: str) -> None:
    """:raises ConfigurationError: one of the options was given."""
    for option, value in options.items():
        if value is not None:
            raise ConfigurationError(problem, field=option, remedy=remedy)


def _advise(
    job: "ReplayJob",
    source: "Trace | FailureModel",
    parameters: "Parameters",
    seed: int,
    repeat: int | None,
    *,
    as_json: bool,
) -> None:
    from ftd.observe.view.progress import delayed_progress
    from ftd.replay.advice import TRACES, advise
    from ftd.replay.advice_table import render_advice
    from ftd.replay.traces.generate import generate
    from ftd.replay.traces.trace import Trace
    from ftd.transport.wire.public import encode_document

    traces = (
        [source]
        if isinstance(source, Trace)
        else [generate(source, seed + number) for number in range(repeat or TRACES)]
    )
    with delayed_progress("replaying, in minutes of the trace") as on_progress:
        advice = advise(job, traces, parameters, on_progress)
    if as_json:
        typer.echo(encode_document(advice).decode().rstrip())
    else:
        print_rich(render_advice(advice))


def _parse_duration(written: str, field: str) -> float:
    """Return a duration such as ``90min`` or ``1.5 h`` in seconds.

    :raises ConfigurationError: it is not one, or is 0.
    """
    match = _DURATION.fullmatch(written.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not seconds:
        raise ConfigurationError(
            f"{written!r} is not a duration",
            field=field,
            remedy="write a number above 0 with s, min, h or d, such as 12h",
        )
    return seconds


def _read_trace(
    path: Path,
    trace_format: str | None,
    system: str | None,
    nodes: int | None,
    max_gap_s: float | None,
    until_s: float | None,
) -> "Trace":
    from ftd.replay.traces.reading import read_trace

    found = read_trace(path, trace_format or "auto", nodes=nodes, system=system, max_gap_s=max_gap_s)
    found = found if until_s is None else found.until(until_s)
    if not found.end_s:
        raise ConfigurationError(
            f"{path} has records of one instant only, so the trace has no length",
            field="--trace",
            remedy="say with --until for how long the nodes stay",
        )
    return found


def _read_failures(path: Path, nodes: int | None, until_s: float | None) -> "FailureModel":
    from msgspec.structs import replace as changed

    from ftd.replay.traces.generate import HOUR_S, read_failure_model

    found = read_failure_model(path)
    if nodes is not None:
        found = changed(found, nodes=nodes)
    return found if until_s is None else changed(found, duration_h=until_s / HOUR_S)


def _compare(
    job: "ReplayJob",
    source: "Trace | FailureModel",
    parameters: "Parameters",
    policies: tuple[str, ...],
    throughput: "ThroughputSource",
    seed: int,
    repeat: int | None,
) -> "Comparison":
    from ftd.observe.view.progress import delayed_progress
    from ftd.replay.comparison import MOST_TRACES, compare
    from ftd.replay.traces.generate import generate
    from ftd.replay.traces.trace import Trace

    def trace_of(number: int) -> Trace:
        return source if isinstance(source, Trace) else generate(source, number)

    with delayed_progress("replaying, in minutes of the trace") as on_progress:
        return compare(
            job,
            trace_of,
            parameters,
            seed=seed,
            most_traces=1 if isinstance(source, Trace) else repeat or MOST_TRACES,
            policies=policies,
            throughput=throughput,
            on_progress=on_progress,
        )
