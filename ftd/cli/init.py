"""``ftd init``: writes a commented job file, from questions or options."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

import typer

from ftd.errors import ConfigurationError
from statemachine.messages.trainer import Precision

if TYPE_CHECKING:
    from ftd.config.job_choices import Tables

T = TypeVar("T")

Size = Literal["tiny", "small", "medium", "large"]


def init(
    path: Annotated[Path, typer.Argument(help="Job file to write.", metavar="PATH")] = Path("job.toml"),
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory of a Hugging Face model, its name in the local cache, or an architecture (llama)."
        ),
    ] = None,
    size: Annotated[
        Size | None,
        typer.Option(help="Size of a model that is built from an architecture.", show_default="small"),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(help="Your training function, instead of --model and --data.", metavar="FILE.py:NAME"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Training data: a file, a pattern in quotes, or a directory; may be repeated."),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field with the text, for files with records.", show_default="text")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Directory of a tokenizer, or bytes: one token per byte.",
            show_default="the model's, or bytes",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per sample.", show_default="1024, or the model's maximum"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job.", show_default="that of the file")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train.", show_default="1000")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate of the schedule.", show_default="0.0003")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Floating-point type to compute with.", show_default="float32")
    ] = None,
    evaluate: Annotated[
        int | None,
        typer.Option(min=0, help="Number of steps between evaluations; 0: never.", show_default="0"),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.", show_default="2")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Number of devices of each node.", show_default="1")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask no questions; use defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented job file, after a few questions.

    Options answer the questions. In a script, or with --yes, no questions are asked. The file lists every key
    with its description and default.

    Example: ftd init llama.toml --model llama --data "corpus/*.jsonl" --tokenizer bytes --yes
    """
    from ftd.config.job_choices import DEFAULT_STEPS, JobChoices, build_tables, path_relative_to

    _check_place(path, force=force)
    ask = _Questions(wanted=not yes and sys.stdin.isatty())
    job_directory = path.absolute().parent
    if function is None:
        sources = _model_and_data(ask, model, size, data, field, tokenizer, job_directory)
    elif given := _given(
        {"--model": model, "--size": size, "--data": data, "--field": field, "--tokenizer": tokenizer}
    ):
        raise ConfigurationError(
            "a training function provides the model and the data",
            field="--function",
            remedy=f"leave out {' and '.join(given)}",
        )
    else:
        script, _, called = function.rpartition(":")
        function = (
            f"{path_relative_to(script, job_directory)}:{called}" if script.endswith(".py") else function
        )
        sources = {}
    if length is None and {"tokens", "text", "instructions", "megatron"} & sources.get("data", {}).keys():
        length = ask.number("Tokens per sample (0: 1024, or the model's maximum)", None, 0) or None
    choices = JobChoices(
        name=ask.text("Name of the job", name, path.stem),
        steps=ask.number("Steps to train", steps, DEFAULT_STEPS, least=1),
        function=function,
        model=sources.get("model"),
        data=sources.get("data"),
        length=length,
        precision=ask.one_of("Precision", precision, get_args(Precision), "float32"),
        backend="nccl" if Path("/dev/nvidia0").exists() else None,
        learning_rate=learning_rate,
        evaluate_every_steps=ask.number("Steps between evaluations (0: never)", evaluate, 0),
        nodes=ask.number("Number of nodes", nodes, 2, least=1),
        devices_per_node=ask.number("Devices per node", devices_per_node, 1, least=1),
    )
    _write(path, build_tables(choices))
    typer.echo(f"wrote {path}; next: {_next_command(path, choices.nodes, choices.devices_per_node)}")


def _next_command(path: Path, nodes: int, devices_per_node: int) -> str:
    """Return the command that trains the job: on this machine, or on a cluster if that needs more processes than
    ``ftd local`` starts.
    """
    from ftd.cli.local import MAX_DEVICES, MAX_NODES

    job = shlex.quote(str(path))
    if nodes > MAX_NODES or devices_per_node > MAX_DEVICES:
        return f"ftd submit {job}"
    devices = f" --devices-per-node {devices_per_node}" if devices_per_node > 1 else ""
    return f"ftd local {job} --nodes {nodes}{devices}"


def _given(options: Mapping[str, object]) -> list[str]:
    return [option for option, value in options.items() if value is not None]


class _Questions:
    """Questions at the terminal for what the options leave open; without a terminal, the defaults apply."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted

    def text(self, question: str, given: str | None, default: str) -> str:
        if given is not None or not self._wanted:
            return default if given is None else given
        answer: str = typer.prompt(question, default=default)
        return answer

    def number(self, question: str, given: int | None, default: int, *, least: int = 0) -> int:
        if given is not None or not self._wanted:
            return default if given is None else given
        while (answer := typer.prompt(question, default=default, type=int)) < least:
            typer.echo(f"enter at least {least}")
        return int(answer)

    def one_of(self, question: str, given: str | None, words: Sequence[str], default: str) -> str:
        if given is not None or not self._wanted:
            return default if given is None else given
        while (answer := typer.prompt(f"{question} ({', '.join(words)})", default=default)) not in words:
            typer.echo(f"{answer} is not one of these")
        return str(answer)

    def until_good(self, question: str, given: str | None, option: str, make: Callable[[str], T]) -> T:
        """Return the result of ``make`` for the option, or for the first answer that it accepts.

        :raises ConfigurationError: the option is wrong, or is missing and no questions are asked.
        """
        if given is not None:
            return make(given)
        if not self._wanted:
            raise ConfigurationError(
                "required", field=option, remedy=f"add {option}, or run the command in a terminal"
            )
        while True:
            try:
                return make(str(typer.prompt(question)))
            except ConfigurationError as error:
                typer.echo(str(error))


def _model_and_data(
    ask: _Questions,
    model: str | None,
    size: str | None,
    data: list[str] | None,
    field: str | None,
    tokenizer: str | None,
    job_directory: Path,
) -> "Tables":
    """Return the tables ``model`` and ``data``.

    :raises ConfigurationError: an option is wrong or missing.
    """
    from ftd.config.job_choices import (
        DEFAULT_SIZE,
        SIZES,
        data_table,
        image_overrides,
        model_table,
        path_relative_to,
    )
    from ftd.config.models import model_directory
    from ftd.config.validation import expand_path

    def model_of(written: str) -> "Tables":
        made = model_table(written, size or DEFAULT_SIZE, job_directory)
        if "architecture" in made:
            made = model_table(written, ask.one_of("Size", size, SIZES, DEFAULT_SIZE), job_directory)
        return made

    made = ask.until_good(
        "Model: directory, name in the local Hugging Face cache, or architecture (llama)",
        model,
        "--model",
        model_of,
    )
    read = ask.until_good(
        "Data: file, pattern (corpus/*.jsonl) or directory",
        data[0] if data else None,
        "--data",
        lambda written: data_table([written, *(data or [])[1:]], field, job_directory),
    )
    _require_effect(
        "--size", size, "architecture" in made, "it is for models that are built from an architecture"
    )
    _require_effect("--field", field, "text" in read, "it is for texts")
    _require_effect("--tokenizer", tokenizer, "images" not in read, "images have no tokens")
    if "images" in read:
        images = expand_path(read["images"], job_directory, "--data")
        made["overrides"] = made.get("overrides", {}) | image_overrides(images, made)
        if "architecture" in made:
            made["task"] = "image-classification"
    elif tokenizer is not None or "text" in read or "instructions" in read:
        named = made.get("huggingface")
        own = named is not None and (model_directory(named, job_directory) / "tokenizer.json").is_file()
        if tokenizer is not None or not own:
            chosen = ask.text("Tokenizer: directory, or bytes", tokenizer, "bytes")
            read["tokenizer"] = chosen if chosen == "bytes" else path_relative_to(chosen, job_directory)
    return {"model": made, "data": read}


def _require_effect(option: str, given: str | None, has_effect: bool, why_not: str) -> None:
    """Check that an option has an effect if it was given.

    :raises ConfigurationError: it has none.
    """
    if given is not None and not has_effect:
        raise ConfigurationError(why_not, field=option, remedy=f"leave out {option}")


def _check_place(path: Path, *, force: bool) -> None:
    """Check that the file can be written.

    :raises ConfigurationError: it already exists, or its directory does not, or this user cannot even look.
    """
    from ftd.observe.view.files import require_directory

    try:
        is_directory, exists = path.is_dir(), path.exists()
        is_file = path.is_file()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}",
            field="PATH",
            remedy="name a file in a directory that you may change",
        ) from None
    if is_directory or (exists and not force):
        remedy = "name a file in it" if is_directory else "name another file, or add --force to replace it"
        raise ConfigurationError(f"{path} already exists", field="PATH", remedy=remedy)
    if exists and not is_file:
        raise ConfigurationError(f"{path} is not a file", field="PATH", remedy="name a file")
    require_directory(path, "PATH")


def _write(path: Path, tables: "Tables") -> None:
    """Write the file, but only if it is a valid job file.

    :raises ConfigurationError: an answer cannot be used; nothing was written.
    """
    from ftd.config.job import load_job_data
    from ftd.config.job_reference import render_job

    unfinished = path.with_name(f".{path.name}.new")
    try:
        unfinished.write_text(render_job(tables), encoding="utf-8")
        load_job_data(unfinished, shown_as=path.name)
        unfinished.replace(path)
    except UnicodeEncodeError:
        raise ConfigurationError(
            "a path or another answer is not valid UTF-8, as a job file must be", remedy="rename the file"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}", field="PATH") from None
    finally:
        unfinished.unlink(missing_ok=True)
