"""``ftd checkpoint``: persistent checkpoints from the outside: what is there, is it sound, take it along."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import JsonOption, print_json, print_rich
from ftd.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint, CheckpointManifest, CheckpointStore

SCHEMA_VERSION = 1

UrlArgument = Annotated[
    str, typer.Argument(help="Directory of the checkpoints, or a URL such as s3://bucket/gpt.", metavar="URL")
]
StepOption = Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step.")]

group = typer.Typer(no_args_is_help=True, help="List, verify and export persistent checkpoints.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="checkpoint")


@group.command("list")
def list_checkpoints(url: UrlArgument, as_json: JsonOption = False) -> None:
    """List complete checkpoints, the newest first.

    And say what was passed over, and why.

    Example: ftd checkpoint list /checkpoints/gpt
    """
    with _told():
        store = _store(url)
        manifests = store.manifests()
    told = {
        "schema": SCHEMA_VERSION,
        "url": url,
        "checkpoints": [_summary(manifest) for manifest in manifests],
        "problems": store.problems,
        "unfinished": store.unfinished,
    }
    if as_json:
        print_json(told)
        return
    from ftd.view.checkpoint import render_checkpoints

    print_rich(render_checkpoints(told))


@group.command()
def verify(url: UrlArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Compare all bytes of checkpoints with what was written.

    Of all complete checkpoints, or of one.

    Exit code 1 if a byte is wrong or a checkpoint is damaged. One that is just being written is named and no
    error.

    Example: ftd checkpoint verify /checkpoints/gpt --step 1000
    """
    with _told():
        store = _store(url)
        steps = store.steps() if step is None else (step,)
        problems, unfinished = list(store.problems), list(store.unfinished)
        opened = [store.open(one) for one in steps]
        if not opened and not problems and not unfinished:
            raise CheckpointError(f"{url} has no checkpoint")
        checkpoints = [_verified(one) for one in opened]
    told = {
        "schema": SCHEMA_VERSION,
        "url": url,
        "checkpoints": checkpoints,
        "problems": problems,
        "unfinished": unfinished,
    }
    if as_json:
        print_json(told)
    else:
        from ftd.view.checkpoint import render_verified

        print_rich(render_verified(told))
    if problems or any(one["problems"] for one in checkpoints):
        raise typer.Exit(1)


@group.command()
def export(
    url: UrlArgument,
    safetensors: Annotated[
        Path, typer.Option(help="Write parameters and buffers to this file.", metavar="FILE")
    ],
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a checkpoint as one safetensors file.

    Of the newest checkpoint, or of a step's. Needs no torch.

    Example: ftd checkpoint export /checkpoints/gpt --safetensors gpt.safetensors
    """
    from storage.safetensors_file import export_safetensors

    _check_output(safetensors)
    with _told():
        checkpoint = _store(url).open(step)
        try:
            done = export_safetensors(checkpoint, safetensors)
        except OSError as error:
            raise ConfigurationError(
                f"{safetensors} cannot be written: {error.strerror or error}", field="--safetensors"
            ) from error
    told = {
        "schema": SCHEMA_VERSION,
        "step": checkpoint.manifest.step,
        "file": str(safetensors),
        "tensors": done.tensors,
        "size_bytes": done.size_bytes,
    }
    if as_json:
        print_json(told)
        return
    from ftd.view.text import plural, size

    tensors = plural(done.tensors, "tensor")
    typer.echo(f"{safetensors}: {tensors}, {size(done.size_bytes)}, step {checkpoint.manifest.step}")


def _store(url: str) -> "CheckpointStore":
    """:raises ConfigurationError: no such place."""
    from storage.checkpoint import CheckpointStore
    from storage.errors import PlaceError

    try:
        return CheckpointStore.at(url)
    except PlaceError as error:
        raise ConfigurationError(str(error), field="URL") from error


def _summary(manifest: "CheckpointManifest") -> dict[str, Any]:
    return {
        "step": manifest.step,
        "job": manifest.job,
        "job_id": manifest.job_id,
        "written_at": manifest.written_at,
        "vote": manifest.vote,
        "layers": len(manifest.layers),
        "size_bytes": manifest.size_bytes,
        "fingerprint": manifest.fingerprint,
        "ftd_version": manifest.ftd_version,
    }


def _verified(checkpoint: "Checkpoint") -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": manifest.step,
        "size_bytes": manifest.size_bytes,
        "problems": list(checkpoint.verify()),
    }


def _check_output(path: Path) -> None:
    """Before reading, not behind it.

    :raises ConfigurationError: nothing can be written there.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory", field="--safetensors", remedy="name a file in it")
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"the directory {path.parent} does not exist",
            field="--safetensors",
            remedy="make it, or name another",
        )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What storage says, as a command says it."""
    from storage.errors import StorageError

    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error
