"""``ftd profile``: measures what each layer of a job's model costs on this machine, for the planner."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import print_rich, run_async

if TYPE_CHECKING:
    from ftd.config.profile_document import ProfileDocument
    from statemachine.messages.values import Job


def profile(
    job: Annotated[Path, typer.Argument(help="Job file.", metavar="JOB.toml")],
    output: Annotated[
        Path | None,
        typer.Option(help="Write the profile here.", metavar="FILE", show_default="NAME.profile.json"),
    ] = None,
    devices_per_node: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Also measure a microbatch split over up to this many devices."),
    ] = 1,
    network: Annotated[
        bool, typer.Option(help="Measure messages and all-reduces between processes on this machine.")
    ] = True,
) -> None:
    """Measure a job's model layer by layer, for ftd plan.

    The command uses this machine's own device and saves the profile as JSON, for ftd plan --profile. It
    builds the model once; nothing is trained.

    Example: ftd profile examples/gpt.toml --output gpt.json
    """
    from ftd.config.job import load_job
    from ftd.config.profile_file import save_profile
    from ftd.observe.view.files import require_distinct, require_writable
    from ftd.observe.view.profile import render_profile

    loaded = load_job(job, devices_per_node=devices_per_node)
    path = output if output is not None else Path(f"{loaded.name}.profile.json")
    require_writable(path, "--output")
    require_distinct(("--output", path), read=[("JOB.toml", job)])
    document = run_async(_measured(loaded, network=network))
    save_profile(path, document)
    print_rich(render_profile(document))
    typer.echo(f"\nwrote {path}; next: ftd plan --profile {shlex.quote(str(path))} --nodes 4")


async def _measured(job: "Job", *, network: bool) -> "ProfileDocument":
    from ftd.cli.profiling.document import build_profile_document
    from ftd.cli.profiling.layers import measure_layers
    from ftd.cli.profiling.network import measure_links
    from ftd.observe.view.progress import delayed_progress

    with delayed_progress("measuring layers") as on_progress:
        layers = await measure_layers(job, on_progress)
    links = None
    if network:
        with delayed_progress("measuring the network") as on_progress:
            links = await measure_links(job.training["backend"], on_progress)
    return build_profile_document(job.name, layers, links, job.policy.devices_per_node)
