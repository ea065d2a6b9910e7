"""``ftd chaos``: faults on demand, over MQTT, where the nodes' configuration allows it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftd.cli.options import (
    BrokerOption,
    ClusterOption,
    ConfigOption,
    JsonOption,
    address_of,
    print_json,
    run_async,
)
from ftd.config.address import ClusterAddress
from ftd.errors import FtdError

if TYPE_CHECKING:
    from ftd.chaos.values import NodeFault, Process, Scenario

NodeArgument = Annotated[str, typer.Argument(help="The node's name.", metavar="NODE")]
TargetOption = Annotated[
    Literal["node", "trainer"], typer.Option(help="node: daemon and trainers; trainer: trainers alone.")
]
DeviceOption = Annotated[
    int | None, typer.Option(min=0, help="Strike the trainer of this device alone; default: all.")
]


def register(app: typer.Typer) -> None:
    chaos = typer.Typer(
        name="chaos",
        help="Inject faults, on nodes that have chaos = true in their ftd.toml.\n\n"
        "Example: ftd chaos kill node-2",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for command in (kill, term, stop, hang, slow, flip, disconnect, run):
        chaos.command(command.__name__)(command)
    app.add_typer(chaos)


def kill(
    node: NodeArgument,
    target: TargetOption = "node",
    device: DeviceOption = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGKILL a node's daemon and all its trainers together, or trainers alone.

    Example: ftd chaos kill node-2 --target trainer
    """
    _strike(address_of(broker, cluster, config), "kill", node, target, device, None, as_json)


def term(
    node: NodeArgument,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a node leave gracefully, as SIGTERM and a spot notice do.

    Example: ftd chaos term node-2
    """
    _strike(address_of(broker, cluster, config), "term", node, "node", None, None, as_json)


def stop(
    node: NodeArgument,
    target: TargetOption = "trainer",
    device: DeviceOption = None,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: for ever.")] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGSTOP: trainers freeze, or with --target node the daemon, too.

    Example: ftd chaos stop node-2 --for 5
    """
    _strike(address_of(broker, cluster, config), "stop", node, target, device, for_s, as_json)


def hang(
    node: NodeArgument,
    device: DeviceOption = None,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: an hour.")] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put the main thread of trainers to sleep while their other threads live on.

    Example: ftd chaos hang node-2
    """
    _strike(address_of(broker, cluster, config), "hang", node, "trainer", device, for_s, as_json)


def slow(
    node: NodeArgument,
    factor: Annotated[
        float, typer.Option(min=1.0, help="Computing takes so many times as long; 1 ends it.")
    ] = 3.0,
    device: DeviceOption = None,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: for ever.")] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a node's trainers compute slowly, as a hot or shared machine does.

    Example: ftd chaos slow node-2 --factor 3 --for 60
    """
    _strike(address_of(broker, cluster, config), "slow", node, "trainer", device, for_s, as_json, factor)


def flip(
    node: NodeArgument,
    device: DeviceOption = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change one bit of what a node's memory keeps of the newest snapshot.

    Example: ftd chaos flip node-2
    """
    _strike(address_of(broker, cluster, config), "flip", node, "trainer", device, None, as_json)


def disconnect(
    node: NodeArgument,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: 5.")] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a node's connection to the broker without a goodbye; it comes back by itself.

    Example: ftd chaos disconnect node-2 --for 3
    """
    _strike(address_of(broker, cluster, config), "disconnect", node, "node", None, for_s, as_json)


def run(
    scenario: Annotated[Path, typer.Argument(help="The scenario.", metavar="SCENARIO.toml")],
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
) -> None:
    """Play a scenario against a running cluster: follow its events, strike when a fault is due.

    Ends when every fault has happened or the job is over. Exit code 1 when a fault was refused or never
    came due.

    Example: ftd chaos run examples/demo-chaos.toml
    """
    from ftd.chaos.inject import require_remote
    from ftd.chaos.scenario import load_scenario

    loaded = load_scenario(scenario)
    require_remote(loaded, scenario.name)
    problems = run_async(_play(address_of(broker, cluster, config), loaded))
    if problems:
        raise FtdError("; ".join(problems))


def _strike(
    address: ClusterAddress,
    do: "NodeFault",
    node: str,
    target: "Process",
    device: int | None,
    for_s: float | None,
    as_json: bool,
    factor: float | None = None,
) -> None:
    """Send one fault. :raises RequestRefused: chaos is off there. :raises Unreachable: nobody answers."""
    from ftd.chaos.inject import RemoteInjector
    from ftd.chaos.targets import layout_of
    from ftd.chaos.values import AfterTime, Fault, Nodes
    from ftd.client import ClusterClient

    fault = Fault(
        id=do,
        trigger=AfterTime(delay_s=0.0),
        do=do,
        target=Nodes(names=(node,)),
        process=target,
        device=device,
        for_s=for_s,
        factor=factor,
    )

    async def ask() -> None:
        async with ClusterClient(address) as client:
            await RemoteInjector(client, layout=lambda: layout_of({})).inject(fault)

    run_async(ask())
    if as_json:
        print_json({"node": node, "fault": do})
    else:
        typer.echo(f"{do} {node}")


async def _play(address: ClusterAddress, scenario: "Scenario") -> list[str]:
    """What went wrong: faults refused, and faults whose moment did not come before the job's end."""
    from ftd.chaos.conductor import Conductor
    from ftd.chaos.inject import RemoteInjector
    from ftd.chaos.targets import layout_of
    from ftd.client import ClusterClient

    problems: list[str] = []
    state: dict[str, Any] = {}
    async with ClusterClient(address, listen=True, on_state=state.update) as client:
        injector = RemoteInjector(client, layout=lambda: layout_of(state), seed=scenario.seed)
        conductor = Conductor(
            scenario,
            inject=injector.inject,
            on_failure=lambda fault, error: problems.append(f"{fault}: {error}"),
        )
        conductor.begin()
        async for event in client.events():
            for fault in conductor.on_event(event):
                typer.echo(str(fault))
            if not conductor.waiting or event.get("event") in ("JobFinished", "JobFailed", "JobStopped"):
                break
        await conductor.finish()
        problems += [f"{fault}: never happened" for fault in conductor.waiting]
    return problems
