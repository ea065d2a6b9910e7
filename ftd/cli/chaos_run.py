"""``ftd chaos run``: plays scenarios of faults and checks the expectations in them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import (
    ClusterOptions,
    print_cluster,
    run_async,
    run_until_signal,
    with_cluster_options,
)
from ftd.errors import ConfigurationError
from ftd.transport.address import ClusterAddress

if TYPE_CHECKING:
    from ftd.faults.chaos.player import ScenarioResult
    from ftd.faults.chaos.values import Scenario


@with_cluster_options
def run(
    scenarios: Annotated[
        list[Path], typer.Argument(help="Scenarios to play, in this order.", metavar="SCENARIO.toml...")
    ],
    local: Annotated[
        bool, typer.Option("--local", help="Start a cluster on this machine, as [cluster] describes it.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(help="Write the results as JUnit XML, for CI.", metavar="FILE.xml")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON.", metavar="FILE.json")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="With --local: write the logs of all processes here.", metavar="DIR")
    ] = None,
    *,
    where: ClusterOptions,
) -> None:
    """Play fault scenarios and check what they expect.

    Scenarios run one after another: the command follows the events of the cluster, injects each fault when it
    is due, and compares what happens with what the scenario expects.

    They run against a running cluster, or with --local against one that is started for them; scenarios with
    the same [cluster] share it. The exit code is 0 if everything was as expected, 1 if something was not, and
    2 if a scenario cannot be played; in this case nothing was injected. Ctrl-C and SIGTERM end the started cluster.

    Example: ftd chaos run --local examples/chaos/node-killed.toml --junit chaos.xml
    """
    from ftd.faults.chaos.report import render_text
    from ftd.faults.chaos.scenario import load_scenario
    from ftd.observe.view.files import require_distinct, require_writable

    _check_options(where, logs, local=local)
    loaded = [load_scenario(path) for path in scenarios]
    for file, option in ((junit, "--junit"), (json_file, "--json")):
        require_writable(file, option)
    require_distinct(
        ("--junit", junit),
        ("--json", json_file),
        ("--logs", logs),
        read=[("SCENARIO.toml", path) for path in scenarios],
    )
    played: list[ScenarioResult] = []

    def on_result(result: "ScenarioResult") -> None:
        typer.echo(render_text(result))
        played.append(result)

    try:
        if local:
            run_until_signal(play_locally(loaded, logs, typer.echo, on_result), typer.echo)
        else:
            run_async(_play_remotely(where.resolve(), loaded, on_result))
    finally:  # A signal or an error leaves the results of the scenarios before it.
        if played:
            played.sort(key=lambda result: loaded.index(result.scenario))
            _write_results(played, len(loaded), junit, json_file)
    raise typer.Exit(0 if all(result.met for result in played) else 1)


def _write_results(
    played: "list[ScenarioResult]", scenarios: int, junit: Path | None, json_file: Path | None
) -> None:
    """Write the files that were asked for, and say so if not all scenarios were played."""
    from ftd.faults.chaos.report import encode_documents, render_junit
    from ftd.observe.view.files import write_file

    if junit is not None:
        write_file(junit, render_junit(played), "--junit")
    if json_file is not None:
        write_file(json_file, encode_documents(played), "--json")
    if len(played) < scenarios:
        typer.echo(f"ftd: {len(played)} of {scenarios} scenarios were played", err=True)


def _check_options(where: ClusterOptions, logs: Path | None, *, local: bool) -> None:
    """:raises ConfigurationError: an option has no effect with or without ``--local``."""
    if logs is not None and not local:
        raise ConfigurationError(
            "only the logs of a cluster that is started for the scenarios can be written",
            field="--logs",
            remedy="add --local, or leave it out",
        )
    for option, given in (
        ("--broker", where.broker),
        ("--cluster", where.cluster),
        ("--config", where.config),
    ):
        if given is not None and local:
            raise ConfigurationError(
                "it names a running cluster, and --local starts one",
                field=option,
                remedy=f"leave out --local or {option}",
            )


async def play_locally(
    scenarios: "list[Scenario]",
    logs: Path | None,
    report_progress: Callable[[str], None],
    on_result: "Callable[[ScenarioResult], None]",
) -> None:
    """Play scenarios on clusters that are started for them. Scenarios that need the same cluster share it.

    :raises ConfigurationError: one of them cannot be played; nothing was started.
    """
    from ftd.local.scenario_cluster import ScenarioCluster, cluster_key, require_setup

    keys = [cluster_key(require_setup(scenario)) for scenario in scenarios]
    played: set[int] = set()
    for number, key in enumerate(keys):
        if number in played:
            continue
        async with ScenarioCluster(key, report=report_progress, logs=logs) as stage:
            for index, scenario in enumerate(scenarios):
                if keys[index] == key:
                    report_progress(f"── {scenario.name}: {scenario.purpose}")
                    on_result(await stage.play(scenario))
                    played.add(index)


async def _play_remotely(
    address: ClusterAddress, scenarios: "list[Scenario]", on_result: "Callable[[ScenarioResult], None]"
) -> None:
    """Play scenarios on a running cluster, with the faults that can be injected over MQTT."""
    from ftd.faults.chaos.inject import require_remote
    from ftd.faults.chaos.remote import play_remotely

    for scenario in scenarios:
        require_remote(scenario, scenario.name)
    print_cluster(address)
    for scenario in scenarios:
        on_result(await play_remotely(address, scenario, report=typer.echo))
