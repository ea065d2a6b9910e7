"""``ftd chaos run``: scenarios, played and judged."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import (
    BrokerOption,
    ClusterOption,
    ConfigOption,
    print_cluster,
    resolve_cluster,
    run_async,
)
from ftd.errors import ConfigurationError
from ftd.transport.address import ClusterAddress

if TYPE_CHECKING:
    from ftd.faults.chaos.player import ScenarioResult
    from ftd.faults.chaos.values import Scenario


def run(
    scenarios: Annotated[list[Path], typer.Argument(help="The scenarios.", metavar="SCENARIO.toml...")],
    local: Annotated[
        bool, typer.Option("--local", help="On a cluster of its own, on this machine, as [cluster] says.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML, for CI.", metavar="FILE.xml")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything that was found.", metavar="FILE.json")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="With --local: keep the logs of all processes here.", metavar="DIR")
    ] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
) -> None:
    """Play scenarios, and check what follows.

    One after another: it follows the events, strikes when a fault is due, and holds what follows against
    what is expected.

    Against a running cluster, or with --local on one that is started for it; scenarios with the same
    [cluster] share one. Exit code 0 when everything was as expected, 1 when something was not, 2 when a
    scenario cannot be played: then nothing was injected.

    Example: ftd chaos run --local examples/chaos/node-killed.toml --junit chaos.xml
    """
    from ftd.faults.chaos.report import encode_documents, render_junit, render_text, write
    from ftd.faults.chaos.scenario import load_scenario

    loaded = [load_scenario(path) for path in scenarios]
    for file, option in ((junit, "--junit"), (json_file, "--json")):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigurationError(f"{file.parent} is no directory", field=option, remedy="make it first")

    def tell(played: "ScenarioResult") -> None:
        typer.echo(render_text(played))

    if local:
        work = play_locally(loaded, logs, typer.echo, tell)
    else:
        work = _play_there(resolve_cluster(broker, cluster, config), loaded, tell)
    all_played = run_async(work)
    if junit is not None:
        write(junit, render_junit(all_played), "--junit")
    if json_file is not None:
        write(json_file, encode_documents(all_played), "--json")
    raise typer.Exit(0 if all(played.met for played in all_played) else 1)


async def play_locally(
    scenarios: "list[Scenario]",
    logs: Path | None,
    report_progress: Callable[[str], None],
    report_result: "Callable[[ScenarioResult], None]",
) -> "list[ScenarioResult]":
    """Each on a cluster that was started for it, shared by those that want the same; in their order.

    :raises ConfigurationError: one of them cannot be played; nothing was started.
    """
    from ftd.local.scenario_cluster import ScenarioCluster, cluster_key, require_setup

    keys = [cluster_key(require_setup(scenario)) for scenario in scenarios]
    found: dict[int, ScenarioResult] = {}
    for number, key in enumerate(keys):
        if number in found:
            continue
        async with ScenarioCluster(key, report=report_progress, logs=logs) as stage:
            for index, scenario in enumerate(scenarios):
                if keys[index] == key and index not in found:
                    report_progress(f"── {scenario.name}: {scenario.purpose}")
                    found[index] = await stage.play(scenario)
                    report_result(found[index])
    return [found[index] for index in range(len(scenarios))]


async def _play_there(
    address: ClusterAddress, scenarios: "list[Scenario]", tell: "Callable[[ScenarioResult], None]"
) -> "list[ScenarioResult]":
    """On a cluster that runs, with what can be done over MQTT."""
    from ftd.faults.chaos.inject import require_remote
    from ftd.faults.chaos.remote import play_remotely

    for scenario in scenarios:
        require_remote(scenario, scenario.name)
    print_cluster(address)
    found = []
    for scenario in scenarios:
        found.append(await play_remotely(address, scenario, report=typer.echo))
        tell(found[-1])
    return found
