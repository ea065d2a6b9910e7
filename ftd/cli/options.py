"""Options that several commands share: which cluster to use, what to plan, and how to print."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from ftd.config.clusters import find_cluster
from ftd.config.validation import field_descriptions
from ftd.errors import ConfigurationError
from ftd.transport.address import ClusterAddress
from planner.values import ActivationCheckpointing

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)")

MAX_DEVICES_PER_NODE = 128

ProfileOption = Annotated[
    Path | None,
    typer.Option(
        help="Measured profile of the model (ftd profile); needs neither a cluster nor the model.",
        metavar="FILE.json",
    ),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node",
        "--devices-per-node",
        min=1,
        max=MAX_DEVICES_PER_NODE,
        help="Number of devices of each node.",
        show_default="the model card's, or 1",
    ),
]
TolerateOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Nodes that may fail at the same time while a copy of each layer remains.",
        show_default="the job's, or 0",
    ),
]
CheckpointingOption = Annotated[
    ActivationCheckpointing | None,
    typer.Option(
        help="What is held for the backward pass: none: everything, selective: matrix products, full: only "
        "inputs, auto: what fits.",
        show_default="the job's, or none",
    ),
]
NodeArgument = Annotated[str, typer.Argument(help="Name of the node.", metavar="NODE")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text.")]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options that name a cluster, as given; ``with_cluster_options`` adds them to a command."""

    broker: Annotated[
        str | None,
        typer.Option(
            help="URL of the broker, mqtt://host:port.",
            show_default="$FTD_BROKER, or the ftd local on this host",
        ),
    ]
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Name of the cluster.", show_default="$FTD_CLUSTER, the only ftd local on this host, or ftd"
        ),
    ]
    config: Annotated[Path | None, typer.Option(help="Read broker and cluster from this ftd.toml.")]

    def resolve(self) -> ClusterAddress:
        """Return the cluster that the options name.

        :raises ConfigurationError: nothing says which cluster is meant.
        """
        return find_cluster(self.broker, self.cluster, self.config)


def with_cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's keyword parameter ``where``, a ``ClusterOptions``, by the options themselves."""
    own = inspect.signature(command).parameters
    position = list(own).index("where")
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=each.type)
        for each in fields(ClusterOptions)
    ]

    @functools.wraps(command)
    def with_where(**given: Any) -> None:
        where = ClusterOptions(**{each.name: given.pop(each.name, None) for each in options})
        command(**given, where=where)

    parameters = list(own.values())
    parameters[position : position + 1] = options
    return set_parameters(with_where, parameters)


def with_table_options(table: type[msgspec.Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds an option for each field of a table of the job file to a command.

    Each option has the name, type and description of its field. The command receives the given options as its
    ``**`` parameter.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        keys = [_key_parameter(field, field_descriptions(table)) for field in msgspec.structs.fields(table)]

        @functools.wraps(command)
        def with_given(**values: Any) -> None:
            not_given = {key.name for key in keys if values[key.name] is None}
            command(**{name: value for name, value in values.items() if name not in not_given})

        return set_parameters(with_given, [*own, *keys])

    return decorated


def set_parameters(
    command: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Give a command these parameters in the eyes of typer, and return it."""
    signature = inspect.Signature(list(parameters))
    vars(command)["__signature__"] = signature
    command.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return command


def _key_parameter(field: msgspec.structs.FieldInfo, meanings: dict[str, str]) -> inspect.Parameter:
    meaning = meanings[field.name].replace("``", "")
    option = typer.Option(None, help=meaning, show_default=f"the job's, or {field.default}")
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=field.type | None
    )


def parse_size(written: str, field: str) -> int:
    """Return a size such as ``80GiB``, ``500 MB`` or ``1048576`` in bytes.

    :raises ConfigurationError: it is not a size, or is below one byte.
    """
    match = _SIZE.fullmatch(written.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit is not None else 0
    if size < 1:
        raise ConfigurationError(
            f"{written!r} is not a size",
            field=field,
            remedy="write for example 80GiB, 500 MB, or a number of bytes",
        )
    return size


def print_cluster(address: ClusterAddress) -> None:
    """Print, on stderr, the cluster that a command is about to change."""
    typer.echo(f"ftd: cluster {address.cluster} at {address.broker.url}", err=True)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Ctrl-C, SIGTERM and a closed terminal cancel it, so that nothing is left of it in the
    terminal or elsewhere, and the exit code is that of a command that the signal ended.
    """
    import asyncio
    import signal

    caught: list[int] = []

    async def run() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: int) -> None:
            caught.append(number)
            loop.remove_signal_handler(number)  # A second one ends the command at once.
            task.cancel()

        for number in _unless_ignored(signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        return await task

    silence_logs()
    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    except asyncio.CancelledError:
        raise typer.Exit(128 + caught[0]) from None


def run_until_signal(work: Coroutine[Any, Any, T], report: Callable[[str], None]) -> T:
    """Run the coroutine of a command that has processes of its own. Ctrl-C, SIGTERM and a closed terminal cancel it,
    so that it ends them, and the exit code is that of a command that the signal ended.

    :param report: called with a sentence once all of them have ended.
    """
    import asyncio
    import signal

    import uvloop

    caught: list[int] = []

    async def run() -> T:
        task = asyncio.ensure_future(work)

        def stop(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGINT, *_unless_ignored(signal.SIGTERM, signal.SIGHUP)):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        try:
            return await task
        except asyncio.CancelledError:
            report("stopped: all processes have ended, and temporary files are removed")
            raise typer.Exit(128 + caught[0]) from None

    silence_logs()
    return uvloop.run(run())


def _unless_ignored(*numbers: int) -> list[int]:
    """Return the signals that this process does not ignore: ``nohup`` lets a command outlast its terminal."""
    import signal

    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def silence_logs() -> None:
    """Turn off logs of the session: for a command, only its result matters."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("mqtt").setLevel(logging.CRITICAL)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, separators=(",", ":")))


def print_rich(renderable: Any) -> None:
    """Print for the terminal, or as plain text into a pipe (wide enough not to cut names)."""
    console = text_console()
    if not console.is_terminal:
        console.width = 120
    console.print(renderable)


def text_console() -> "Console":
    """Return a console that prints names and paths as they are, whatever they have in brackets or between colons."""
    from rich.console import Console

    return Console(markup=False, emoji=False)
