"""``ftd data``: prepare texts for training: a tokenizer of your own, and flat files of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ftd.errors import ConfigurationError

group = typer.Typer(no_args_is_help=True, help="Prepare texts for training: tokenizers and token files.")

FilesArgument = Annotated[
    list[str],
    typer.Argument(
        help="JSON lines, Parquet, Arrow or plain text files, or patterns in quotes.", metavar="FILES"
    ),
]
FieldOption = Annotated[str, typer.Option(help="The field with the text, in files with records.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="data")


@group.command()
def tokenize(
    files: FilesArgument,
    tokenizer: Annotated[str, typer.Option(help="Directory with a tokenizer.json, or that file.")],
    out: Annotated[Path, typer.Option(help="The token file to write, such as tokens.bin.")],
    field: FieldOption = "text",
    end_of_text: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token after each document.", show_default="the tokenizer's"),
    ] = None,
    no_end_of_text: Annotated[
        bool, typer.Option("--no-end-of-text", help="Put no token after documents.")
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn texts into a flat file of tokens.

    Documents follow each other, each with a token for the end of a text after it. A JSON file next to the
    token file says what is in it. A job reads it as a token file, without the time that tokenising takes.

    Example: ftd data tokenize "corpus/*.jsonl" --tokenizer tokenizer --out tokens.bin
    """
    from runtime.sources.errors import find_files
    from runtime.sources.tokenizer import load_tokenizer
    from runtime.sources.tokenizing import make_token_file

    if no_end_of_text and end_of_text is not None:
        raise ConfigurationError(
            "a token after documents is both wanted and not wanted",
            field="--end-of-text",
            remedy="leave out --no-end-of-text",
        )
    if out.suffix in (".npy", ".json"):
        raise ConfigurationError(
            f"a token file has nothing but tokens, so {out.name} is a misleading name",
            field="--out",
            remedy="end it in .bin",
        )
    _check_absent(out, overwrite)
    with _data_errors(out):
        texts = find_files(files, "text file")
        if out.resolve() in (path.resolve() for path in texts):
            raise ConfigurationError(
                f"{out} is one of the text files", field="--out", remedy="write the tokens to another file"
            )
        info = make_token_file(
            out,
            texts,
            load_tokenizer(tokenizer),
            field=field,
            end_of_text=end_of_text or not no_end_of_text,
            report=_report,
        )
    typer.echo(
        f"{out}: {info.tokens} tokens ({info.dtype}) of {info.documents} documents; "
        f"the largest token id is {info.max_token_id}, the tokenizer's vocabulary has {info.vocabulary_size}"
    )


@group.command("train-tokenizer")
def train_tokenizer(
    files: FilesArgument,
    out: Annotated[Path, typer.Option(help="The directory to write.")],
    vocabulary: Annotated[int, typer.Option(help="The most tokens it may have.")] = 32768,
    field: FieldOption = "text",
    overwrite: OverwriteOption = False,
) -> None:
    """Train a byte-level BPE tokenizer on texts.

    It has tokens for the end of a text, for padding and for masks, and transformers reads the directory with
    AutoTokenizer.from_pretrained.

    Example: ftd data train-tokenizer "corpus/*.txt" --vocabulary 4096 --out tokenizer
    """
    from runtime.sources.errors import find_files
    from runtime.sources.tokenizer_training import SMALLEST_VOCABULARY
    from runtime.sources.tokenizer_training import train_tokenizer as train

    if vocabulary < SMALLEST_VOCABULARY:
        raise ConfigurationError(
            f"{vocabulary} tokens are too few for all bytes and the special tokens",
            field="--vocabulary",
            remedy=f"give at least {SMALLEST_VOCABULARY}",
        )
    _check_absent(out / "tokenizer.json", overwrite)
    with _data_errors(out):
        size = train(find_files(files, "text file"), field=field, vocabulary=vocabulary, out=out)
    typer.echo(f"{out}: a tokenizer with {size} tokens")


def _check_absent(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ConfigurationError(f"{path} exists", field="--out", remedy="add --overwrite to replace it")


@contextmanager
def _data_errors(out: Path) -> Iterator[None]:
    """Turn the errors of data sources, and those of writing ``out``, into ours."""
    from runtime.sources.errors import DataError

    try:
        yield
    except DataError as error:
        raise ConfigurationError(str(error)) from error
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error}", field="--out") from error


def _report(line: str) -> None:
    typer.echo(line, err=True)
