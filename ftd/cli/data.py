"""``ftd data``: prepares texts for training: trains tokenizers and writes token files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ftd.errors import ConfigurationError

group = typer.Typer(
    name="data", no_args_is_help=True, help="Prepare texts for training: tokenizers and token files."
)

FilesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Files of JSON lines, Parquet, Arrow or plain text, or patterns in quotes.", metavar="FILES"
    ),
]
FieldOption = Annotated[str, typer.Option(help="Field with the text, for files with records.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]


@group.command()
def tokenize(
    files: FilesArgument,
    tokenizer: Annotated[str, typer.Option(help="Directory with a tokenizer.json, or the file itself.")],
    out: Annotated[Path, typer.Option(help="Token file to write, such as tokens.bin.")],
    field: FieldOption = "text",
    end_of_text: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Token to write after each document.", show_default="the tokenizer's"
        ),
    ] = None,
    no_end_of_text: Annotated[
        bool, typer.Option("--no-end-of-text", help="Write no token after documents.")
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn texts into a flat file of tokens.

    Documents follow each other, each with an end-of-text token after it. A JSON file next to the token file
    describes its content. A job that reads the token file saves the time of tokenising.

    Example: ftd data tokenize "corpus/*.jsonl" --tokenizer tokenizer --out tokens.bin
    """
    from runtime.sources.errors import find_files
    from runtime.sources.tokenizer import load_tokenizer
    from runtime.sources.tokenizing import make_token_file

    if no_end_of_text and end_of_text is not None:
        raise ConfigurationError(
            "--end-of-text and --no-end-of-text exclude each other",
            field="--end-of-text",
            remedy="leave out one of them",
        )
    if out.suffix in (".npy", ".json"):
        raise ConfigurationError(
            f"a token file has no header, so the name {out.name} would be misleading",
            field="--out",
            remedy="use the suffix .bin",
        )
    _check_absent(out, overwrite)
    with _data_errors(out):
        texts = find_files(files, "text file")
        if out.resolve() in (path.resolve() for path in texts):
            raise ConfigurationError(
                f"{out} is one of the text files", field="--out", remedy="name another file for the tokens"
            )
        info = make_token_file(
            out,
            texts,
            load_tokenizer(tokenizer),
            field=field,
            end_of_text=not no_end_of_text if end_of_text is None else end_of_text,
            report=lambda line: typer.echo(line, err=True),
        )
    typer.echo(
        f"{out}: {info.tokens} tokens ({info.dtype}) of {info.documents} documents; "
        f"the largest token id is {info.max_token_id}, and the vocabulary has {info.vocabulary_size} tokens"
    )


@group.command("train-tokenizer")
def train_tokenizer(
    files: FilesArgument,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    vocabulary: Annotated[int, typer.Option(help="Largest number of tokens in the vocabulary.")] = 32768,
    field: FieldOption = "text",
    overwrite: OverwriteOption = False,
) -> None:
    """Train a byte-level BPE tokenizer on texts.

    It has tokens for the end of a text, for padding and for masks. transformers reads the directory with
    AutoTokenizer.from_pretrained.

    Example: ftd data train-tokenizer "corpus/*.txt" --vocabulary 4096 --out tokenizer
    """
    from runtime.sources.errors import find_files
    from runtime.sources.tokenizer_training import SMALLEST_VOCABULARY
    from runtime.sources.tokenizer_training import train_tokenizer as train

    if vocabulary < SMALLEST_VOCABULARY:
        raise ConfigurationError(
            f"{vocabulary} tokens are too few for all bytes and special tokens",
            field="--vocabulary",
            remedy=f"give at least {SMALLEST_VOCABULARY}",
        )
    _check_absent(out / "tokenizer.json", overwrite)
    with _data_errors(out):
        size = train(find_files(files, "text file"), field=field, vocabulary=vocabulary, out=out)
    typer.echo(f"{out}: a tokenizer with {size} tokens")


def _check_absent(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"{path} is not a file", field="--out", remedy="name a file")
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"{path} already exists", field="--out", remedy="add --overwrite to replace it"
        )


@contextmanager
def _data_errors(out: Path) -> Iterator[None]:
    """Turn errors of data sources, and of writing ``out``, into errors of the command."""
    from runtime.sources.errors import DataError

    try:
        yield
    except DataError as error:
        raise ConfigurationError(str(error)) from error
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error}", field="--out") from error
