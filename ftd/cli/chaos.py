"""``ftd chaos``: injects faults over MQTT into nodes whose configuration allows it."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftd.cli.chaos_run import run
from ftd.cli.options import (
    ClusterOptions,
    JsonOption,
    NodeArgument,
    print_cluster,
    print_json,
    run_async,
    set_parameters,
    with_cluster_options,
)
from ftd.cli.soak import soak
from ftd.errors import ConfigurationError
from ftd.transport.address import ClusterAddress

if TYPE_CHECKING:
    from ftd.transport.wire.public import NodeFault

TargetOption = Annotated[
    Literal["node", "trainer"],
    typer.Option("--target", help="node: the daemon and its trainers; trainer: only trainers."),
]
DeviceOption = Annotated[
    int | None,
    typer.Option(min=0, help="Inject only into the trainer of this device.", show_default="all trainers"),
]
UnlimitedDurationOption = Annotated[
    float | None, typer.Option("--for", help="Duration in seconds.", show_default="unlimited")
]
ShortDurationOption = Annotated[
    float | None, typer.Option("--for", help="Duration in seconds.", show_default="10")
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--size-mib", min=1, help="Largest size to fill, in MiB; fails if more is free.", show_default="1024"
    ),
]


group = typer.Typer(
    name="chaos",
    help="Inject faults into nodes that allow it.\n\n"
    "Such nodes have chaos = true under [node] in their ftd.toml.\n\n"
    "Example: ftd chaos kill node-2",
    no_args_is_help=True,
    rich_markup_mode=None,
)


# Each of these functions declares the options of one fault, and ``_fault_command`` makes its command.


def kill(node: NodeArgument, process: TargetOption = "node", device: DeviceOption = None) -> None:
    """Kill a node or only its trainers with SIGKILL.

    With --target trainer, the daemon survives.

    Example: ftd chaos kill node-2 --target trainer
    """


def term(node: NodeArgument) -> None:
    """Make a node leave gracefully, as after a spot notice.

    Example: ftd chaos term node-2
    """


def stop(
    node: NodeArgument,
    process: TargetOption = "trainer",
    device: DeviceOption = None,
    for_s: UnlimitedDurationOption = None,
) -> None:
    """Pause trainers with SIGSTOP.

    With --target node, the daemon is paused as well.

    Example: ftd chaos stop node-2 --for 5
    """


def hang(
    node: NodeArgument,
    device: DeviceOption = None,
    for_s: Annotated[
        float | None, typer.Option("--for", help="Duration in seconds.", show_default="3600")
    ] = None,
) -> None:
    """Put the main threads of trainers to sleep.

    Their other threads stay alive: heartbeats continue, but no step completes.

    Example: ftd chaos hang node-2
    """


def raise_(node: NodeArgument, device: DeviceOption = None) -> None:
    """Raise an exception in the training loop.

    The effect is that of a bug in the user's code.

    Example: ftd chaos raise node-2
    """


def slow(
    node: NodeArgument,
    factor: Annotated[
        float, typer.Option(min=1.0, help="Multiply computing times by this factor; 1 ends the fault.")
    ] = 3.0,
    device: DeviceOption = None,
    for_s: UnlimitedDurationOption = None,
) -> None:
    """Slow down the trainers of a node.

    The effect is that of a machine that runs too hot.

    Example: ftd chaos slow node-2 --factor 3 --for 60
    """


def flip(node: NodeArgument, device: DeviceOption = None) -> None:
    """Flip one bit of a snapshot in a node's memory.

    The newest snapshot that the node holds is changed.

    Example: ftd chaos flip node-2
    """


def corrupt(node: NodeArgument, device: DeviceOption = None) -> None:
    """Flip one bit of a parameter in a trainer's memory.

    Nothing fails at once: the effect is that of silent corruption by a bad device. The comparison of replicas
    finds it.

    Example: ftd chaos corrupt node-2
    """


def bad_device(
    node: NodeArgument,
    how: Annotated[
        Literal["wrong", "slow", "hung"],
        typer.Option(
            help="wrong: a product is not exact; slow: four times slower; hung: the test never ends."
        ),
    ] = "wrong",
    device: DeviceOption = None,
    for_s: Annotated[
        float | None, typer.Option("--for", help="Duration in seconds.", show_default="60")
    ] = None,
) -> None:
    """Make devices bad in a node's next health checks.

    Training is not affected. A node is checked before it returns and while it is idle.

    Example: ftd chaos bad-device node-2 --how slow --for 30
    """


def disconnect(
    node: NodeArgument,
    for_s: Annotated[
        float | None, typer.Option("--for", help="Duration in seconds.", show_default="5")
    ] = None,
) -> None:
    """Cut a node's connection to the broker.

    The connection ends without a DISCONNECT packet; the node reconnects by itself.

    Example: ftd chaos disconnect node-2 --for 3
    """


def lossy(
    node: NodeArgument,
    drop: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability that a message is lost.")] = 0.0,
    duplicate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that a message arrives twice.")
    ] = 0.0,
    late_s: Annotated[
        float, typer.Option("--late", min=0.0, max=60.0, help="Largest delay of a message, in seconds.")
    ] = 0.0,
    for_s: ShortDurationOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random choice of messages.")] = 0,
) -> None:
    """Lose, duplicate and delay messages of a node.

    Both directions are affected: what it sends and what is sent to it.

    Example: ftd chaos lossy node-2 --drop 0.05 --duplicate 0.2 --late 0.3 --for 20
    """


def fill_memory(node: NodeArgument, size_mib: SizeOption = None, for_s: ShortDurationOption = None) -> None:
    """Fill the memory file system that holds a node's snapshots.

    Example: ftd chaos fill-memory node-2 --size-mib 512 --for 5
    """


def fill_disk(node: NodeArgument, size_mib: SizeOption = None, for_s: ShortDurationOption = None) -> None:
    """Fill the disk that holds the job's checkpoints.

    Example: ftd chaos fill-disk node-2 --size-mib 512 --for 5
    """


def _fault_command(declared: Callable[..., None]) -> Callable[..., None]:
    """Return the command of a fault: with the parameters of ``declared``, then those that all commands have."""
    do: Any = declared.__name__.rstrip("_")

    def command(*, node: str, where: ClusterOptions, as_json: JsonOption = False, **fields: Any) -> None:
        _inject(where.resolve(), do, node, fields, as_json=as_json)

    own, common = (inspect.signature(each).parameters for each in (declared, command))
    command.__name__, command.__doc__ = do, declared.__doc__
    set_parameters(command, [*own.values(), common["where"], common["as_json"]])
    return with_cluster_options(command)


def _inject(
    address: ClusterAddress, do: "NodeFault", node: str, fields: dict[str, Any], *, as_json: bool
) -> None:
    """Send one fault to a node.

    :param fields: ``seed``, and fields of ``ftd.faults.chaos.values.Fault``.
    :raises ConfigurationError: an option has no effect on this fault, or its value is not allowed.
    :raises RequestRejected: there is no such node, it is offline, or chaos is not allowed there.
    :raises UnreachableError: the node does not answer.
    """
    from ftd.faults.chaos.inject import RemoteInjector
    from ftd.faults.chaos.targets import read_layout
    from ftd.faults.chaos.values import AfterTime, Fault, NamedNodes
    from ftd.transport.client import ClusterClient

    _check_options(do, fields)
    seed = fields.pop("seed", 0)
    fault = Fault(id=do, trigger=AfterTime(delay_s=0.0), do=do, target=NamedNodes(names=(node,)), **fields)

    async def ask() -> None:
        async with ClusterClient(address) as client:
            await client.require_present(node)
            await RemoteInjector(client, layout=lambda: read_layout({}), seed=seed).inject(fault)

    print_cluster(address)
    run_async(ask())
    if as_json:
        print_json({"node": node, "fault": do, "cluster": address.cluster})
    else:
        typer.echo(f"{do} {node}")


def _check_options(do: str, fields: Mapping[str, Any]) -> None:
    """Check what neither typer nor the node can: a message has no infinity, and a fault of a node no device.

    :raises ConfigurationError: an option has no effect on this fault, or its value is not allowed.
    """
    if fields.get("process") == "node" and fields.get("device") is not None:
        raise ConfigurationError(
            f"it has no effect on {do} of a whole node", field="--device", remedy="add --target trainer"
        )
    for option, name, least in (("--for", "for_s", "seconds above 0"), ("--factor", "factor", "1 or more")):
        value = fields.get(name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigurationError(f"{value:g} is not allowed", field=option, remedy=f"write {least}")


_OF_TRAINERS = kill, term, stop, hang, raise_, slow, flip, corrupt, bad_device
for fault in (*_OF_TRAINERS, disconnect, lossy, fill_memory, fill_disk):
    group.command()(_fault_command(fault))
group.command()(run)
group.command()(soak)
