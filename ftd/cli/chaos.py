"""``ftd chaos``: faults on demand, over MQTT, where the nodes' configuration allows it."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftd.cli import soak
from ftd.cli.chaos_run import run
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

if TYPE_CHECKING:
    from ftd.chaos.values import NodeFault, Process

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
    for command in (kill, term, stop, hang, raise_, slow, flip, disconnect, lossy, fill_memory, fill_disk):
        chaos.command(command.__name__.rstrip("_").replace("_", "-"))(command)
    chaos.command("run")(run)
    chaos.command("soak")(soak.soak)
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


def raise_(
    node: NodeArgument,
    device: DeviceOption = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have an exception come out of the training loop, as a bug of the user's code would.

    Example: ftd chaos raise node-2
    """
    _strike(address_of(broker, cluster, config), "raise", node, "trainer", device, None, as_json)


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


def lossy(
    node: NodeArgument,
    drop: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability that a message is lost.")] = 0.0,
    duplicate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that a message comes twice.")
    ] = 0.0,
    late_s: Annotated[
        float, typer.Option("--late", min=0.0, max=60.0, help="Seconds that a message is late at most.")
    ] = 0.0,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: 10.")] = None,
    seed: Annotated[int, typer.Option(help="What is drawn from.")] = 0,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lose, double and delay messages between a node and the coordinator, in both directions.

    Example: ftd chaos lossy node-2 --drop 0.05 --duplicate 0.2 --late 0.3 --for 20
    """
    address = address_of(broker, cluster, config)
    more = {"drop": drop, "duplicate": duplicate, "late_s": late_s}
    _strike(address, "lossy", node, "node", None, for_s, as_json, seed=seed, **more)


def fill_memory(
    node: NodeArgument,
    size_mib: Annotated[
        int | None, typer.Option("--size-mib", min=1, help="Refuse if more is free; default: 1024.")
    ] = None,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: 10.")] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Leave no room in the memory file system that a node's snapshots live in.

    Example: ftd chaos fill-memory node-2 --size-mib 512 --for 5
    """
    address = address_of(broker, cluster, config)
    _strike(address, "fill_memory", node, "node", None, for_s, as_json, size_mib=size_mib)


def fill_disk(
    node: NodeArgument,
    size_mib: Annotated[
        int | None, typer.Option("--size-mib", min=1, help="Refuse if more is free; default: 1024.")
    ] = None,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds; default: 10.")] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Leave no room on the disk that the job's checkpoints are on.

    Example: ftd chaos fill-disk node-2 --size-mib 512 --for 5
    """
    address = address_of(broker, cluster, config)
    _strike(address, "fill_disk", node, "node", None, for_s, as_json, size_mib=size_mib)


def _strike(
    address: ClusterAddress,
    do: "NodeFault",
    node: str,
    target: "Process",
    device: int | None,
    for_s: float | None,
    as_json: bool,
    factor: float | None = None,
    seed: int = 0,
    **more: Any,
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
        **more,
    )

    async def ask() -> None:
        async with ClusterClient(address) as client:
            await RemoteInjector(client, layout=lambda: layout_of({}), seed=seed).inject(fault)

    run_async(ask())
    if as_json:
        print_json({"node": node, "fault": do})
    else:
        typer.echo(f"{do} {node}")
