"""The number and size of the files that a job reads. Hosts with other files would silently train on other
data.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from runtime.sources.errors import DataError, find_files
from runtime.wire.recipe import BYTES, DataTable, FileTotals, Recipe


def count_files(recipe: Recipe) -> dict[str, FileTotals]:
    """Return the number and size of the files that each key of a job file names.

    :raises DataError: a file is missing.
    """
    facts = {}
    for key, paths in _used_files(recipe):
        try:
            facts[key] = FileTotals(files=len(paths), bytes=sum(path.stat().st_size for path in paths))
        except OSError as error:
            raise DataError(f"{key}: {error}") from error
    return facts


def check_files(recipe: Recipe, expected: Mapping[str, FileTotals]) -> None:
    """Check that this host has the files with which the job was submitted.

    :raises DataError: the files differ in number or size; the message names the key.
    """
    if not expected:
        return
    try:
        found = count_files(recipe)
    except DataError as error:
        raise DataError(f"this host lacks files of the job: {error}; copy them to every node") from error
    for key, facts in expected.items():
        if (here := found.get(key)) != facts:
            has = "none" if here is None else f"{here.files} with {here.bytes} bytes"
            raise DataError(
                f"{key}: the job was submitted with {facts.files} files of {facts.bytes} bytes, and this host has "
                f"{has}; copy the same files to every node"
            )


def _used_files(recipe: Recipe) -> Iterator[tuple[str, list[Path]]]:
    if recipe.model.huggingface is not None:
        place = Path(recipe.model.huggingface)
        weights = [] if recipe.model.weights == "random" else sorted(place.glob("*.safetensors"))
        yield "model.huggingface", [place / "config.json", *weights]
    yield from _data_files("data", recipe.data)
    if recipe.evaluation.data is not None:
        yield from _data_files("evaluation.data", recipe.evaluation.data)


def _data_files(where: str, table: DataTable) -> Iterator[tuple[str, list[Path]]]:
    for name in ("tokens", "text", "instructions", "images"):
        if (patterns := getattr(table, name)) is not None:
            yield f"{where}.{name}", find_files(patterns, "file")
    if table.megatron is not None:
        yield f"{where}.megatron", [Path(f"{table.megatron}{ending}") for ending in (".bin", ".idx")]
    if table.huggingface is not None:
        yield f"{where}.huggingface", sorted(Path(table.huggingface).glob("*.arrow"))
    if table.tokenizer is not None and table.tokenizer != BYTES:
        path = Path(table.tokenizer)
        yield f"{where}.tokenizer", [path if path.is_file() else path / "tokenizer.json"]
