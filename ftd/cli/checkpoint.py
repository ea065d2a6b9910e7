"""``ftd checkpoint``: lists, verifies and exports persistent checkpoints."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftd.cli.options import JsonOption, parse_size, print_json, print_rich
from ftd.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint, CheckpointManifest, CheckpointStore

SCHEMA_VERSION = 1
DEFAULT_SHARD_SIZE = "5GB"

UrlArgument = Annotated[
    str, typer.Argument(help="Directory of the checkpoints or a URL such as s3://bucket/gpt.", metavar="URL")
]
Format = Literal["huggingface", "torch", "safetensors"]
"""Output formats of ``export``."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Types that ``export`` can convert to."""
StepOption = Annotated[int | None, typer.Option(min=0, help="Use the checkpoint of this step.")]

group = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="List, verify and export persistent checkpoints."
)


@group.command("list")
def list_checkpoints(url: UrlArgument, as_json: JsonOption = False) -> None:
    """List complete checkpoints, the newest first.

    Incomplete and corrupt checkpoints are listed with the reason.

    Example: ftd checkpoint list /checkpoints/gpt
    """
    with _command_errors():
        store = _store(url)
        manifests = store.manifests()
    document = {
        "schema": SCHEMA_VERSION,
        "url": url,
        "checkpoints": [_summary(manifest) for manifest in manifests],
        "problems": store.problems,
        "unfinished": store.unfinished,
    }
    if as_json:
        print_json(document)
        return
    from ftd.observe.view.checkpoint import render_checkpoints

    print_rich(render_checkpoints(document))


@group.command()
def verify(url: UrlArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Compare all bytes of checkpoints with their checksums.

    All complete checkpoints are verified, or only that of --step.

    The exit code is 1 if a byte is wrong or a checkpoint is corrupt. A checkpoint that is still being written
    is listed and is not an error.

    Example: ftd checkpoint verify /checkpoints/gpt --step 1000
    """
    from storage.errors import LocationError

    with _command_errors():
        store = _store(url)
        steps = store.steps() if step is None else (step,)
        problems, unfinished = list(store.problems), list(store.unfinished)
        opened = [store.open(one) for one in steps]
        if not opened and not problems and not unfinished:
            raise CheckpointError(f"{url} has no checkpoint")
        checkpoints = []
        for one in opened:
            try:
                checkpoints.append(_verified(one))
            except LocationError:
                if step is not None or not _is_removed(store, one):
                    raise
    document = {
        "schema": SCHEMA_VERSION,
        "url": url,
        "checkpoints": checkpoints,
        "problems": problems,
        "unfinished": unfinished,
    }
    if as_json:
        print_json(document)
    else:
        from ftd.observe.view.checkpoint import render_verified

        print_rich(render_verified(document))
    if problems or any(one["problems"] for one in checkpoints):
        raise typer.Exit(1)


@group.command()
def export(
    url: UrlArgument,
    output: Annotated[Path, typer.Argument(help="File or directory to write.", metavar="OUTPUT")],
    kind: Annotated[
        Format,
        typer.Option(
            "--format",
            help="huggingface: a directory for from_pretrained; torch: a directory with model, optimizer and "
            "schedule; safetensors: one file with parameters and buffers.",
        ),
    ],
    step: StepOption = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Convert floating-point weights to this type.", show_default="no conversion"),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="huggingface: largest size of a weights file, such as 5GB or 500MiB.",
            show_default=DEFAULT_SHARD_SIZE,
        ),
    ] = None,
    files_from: Annotated[
        Path | None,
        typer.Option(
            help="huggingface: copy config.json, the tokenizer and similar files from this directory."
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="huggingface: merge an adapter (LoRA) into its base model; needs torch."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a checkpoint for other tools.

    The newest checkpoint is exported, or that of --step. Only --merge needs torch.

    Example: ftd checkpoint export /checkpoints/llama my-llama --format huggingface --dtype bfloat16
    """
    from ftd.snapshots.checkpoint_export import export_to_huggingface
    from storage.safetensors_file import export_safetensors
    from storage.torch_directory import export_torch

    _check_options(kind, dtype=dtype, max_shard_size=max_shard_size, files_from=files_from, merge=merge)
    _check_output(output, kind)
    shard_bytes = parse_size(
        DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size, "--max-shard-size"
    )
    with _command_errors():
        checkpoint = _store(url).open(step)
        try:
            match kind:
                case "safetensors":
                    done = export_safetensors(checkpoint, output, dtype)
                case "torch":
                    done = export_torch(checkpoint, output)
                case "huggingface":
                    done = export_to_huggingface(
                        checkpoint,
                        output,
                        dtype=dtype,
                        max_shard_bytes=shard_bytes,
                        files_from=files_from,
                        merge=merge,
                    )
        except OSError as error:
            raise ConfigurationError(
                f"{output} cannot be written: {error.strerror or error}", field="OUTPUT"
            ) from error
    document = {
        "schema": SCHEMA_VERSION,
        "step": checkpoint.manifest.step,
        "format": kind,
        "output": str(output),
        "tensors": done.tensors,
        "size_bytes": done.size_bytes,
    }
    if as_json:
        print_json(document)
        return
    from ftd.observe.view.text import format_size, plural

    tensors = plural(done.tensors, "tensor")
    typer.echo(f"{output}: {tensors}, {format_size(done.size_bytes)}, step {checkpoint.manifest.step}")


def _store(url: str) -> "CheckpointStore":
    """Open the checkpoints at a location.

    :raises ConfigurationError: the location does not exist.
    """
    from storage.checkpoint import CheckpointStore
    from storage.errors import LocationError

    try:
        return CheckpointStore.at(url)
    except LocationError as error:
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


def _is_removed(store: "CheckpointStore", checkpoint: "Checkpoint") -> bool:
    """Return whether the job has removed the checkpoint since it was opened."""
    from storage.errors import CheckpointMissingError

    try:
        store.open(checkpoint.manifest.step)
    except CheckpointMissingError:
        return True
    return False


def _verified(checkpoint: "Checkpoint") -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": manifest.step,
        "size_bytes": manifest.size_bytes,
        "problems": list(checkpoint.verify()),
    }


def _check_options(
    kind: Format, *, dtype: Dtype | None, max_shard_size: str | None, files_from: Path | None, merge: bool
) -> None:
    """Check that all options apply to the format.

    :raises ConfigurationError: an option does not apply.
    """
    for option, given in (
        ("--max-shard-size", max_shard_size is not None),
        ("--files-from", files_from is not None),
        ("--merge", merge),
    ):
        if given and kind != "huggingface":
            raise ConfigurationError(
                f"it does not apply to --format {kind}", field=option, remedy=f"leave out {option}"
            )
    if dtype is not None and kind == "torch":
        raise ConfigurationError(
            "--format torch keeps the exact numbers of the checkpoint, to continue training from them",
            field="--dtype",
            remedy="leave out --dtype",
        )
    if files_from is not None and not files_from.is_dir():
        raise ConfigurationError(
            f"{files_from} is not a directory",
            field="--files-from",
            remedy="name the directory of the model that was trained",
        )


def _check_output(path: Path, kind: Format) -> None:
    """Check the output before anything is read.

    :raises ConfigurationError: nothing can be written there.
    """
    from ftd.observe.view.files import require_directory

    if kind == "safetensors" and path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "not a file"
        raise ConfigurationError(f"{path} is {what}", field="OUTPUT", remedy="name a file")
    if kind != "safetensors" and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(
            f"{path} already exists", field="OUTPUT", remedy="name a new or an empty directory"
        )
    if path.absolute() == Path.cwd():
        raise ConfigurationError(
            f"{path} is the current directory, which cannot be replaced",
            field="OUTPUT",
            remedy="name a new directory",
        )
    if kind != "safetensors" and (path.is_symlink() or path.is_mount()):
        raise ConfigurationError(
            f"{path} is a link or a mount point, which cannot be replaced",
            field="OUTPUT",
            remedy="name a new directory",
        )
    require_directory(path, "OUTPUT")


@contextlib.contextmanager
def _command_errors() -> Iterator[None]:
    """Turn errors of the storage package into errors of the command."""
    from storage.errors import StorageError

    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error
