"""Readers of texts and records in files: JSON lines, Parquet, Arrow and plain text.

Files are read in order and in parts, so that a corpus may be larger than memory. Each record comes with its
location ("corpus.jsonl, line 7"), for messages.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from runtime.sources.errors import DataError, import_package

JSON_LINES = (".jsonl", ".ndjson", ".json")
ROWS_AT_ONCE = 1024

Record = tuple[str, dict[str, Any]]
"""Location and fields of a record."""


class Document(NamedTuple):
    """A text that is tokenised."""

    location: str
    text: str
    learned: tuple[tuple[int, int], ...] = ()
    """Character ranges ``[first, end)`` of the text that a model learns; empty for all of it."""
    is_rendered: bool = False
    """Whether the text already contains its special tokens, as chat templates write them."""


def read_texts(files: Iterable[Path], field: str) -> Iterator[Document]:
    """Yield the documents of files; empty ones are left out.

    In JSON lines, Parquet and Arrow files ``field`` of each record is a document. Any other file is plain
    text (UTF-8) and one document.

    :raises DataError: a file or a record of it cannot be used; the message names both.
    """
    for path in files:
        if not is_table(path):
            text = _read_text(path)
            if text:
                yield Document(str(path), text)
            continue
        for place, record in read_records(path, (field,)):
            text = text_field(place, record, field)
            if text:
                yield Document(place, text)


def text_field(place: str, record: dict[str, Any], field: str) -> str:
    """Return the text in ``field``.

    :raises DataError: the field is missing or is not text.
    """
    if field not in record:
        raise DataError(
            f'{place}: there is no field "{field}"; the fields are {_names(record)}. '
            "Name the field with the text"
        )
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f'{place}: the field "{field}" must be a string, not {_kind(value)}')
    return value


def is_table(path: Path) -> bool:
    """Return whether the file has records with named fields, according to its name."""
    return _suffix(path) in (*JSON_LINES, ".parquet", ".arrow")


def read_records(path: Path, fields: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the records of a JSON lines, Parquet or Arrow file.

    :param fields: columns to read from Parquet and Arrow files; None for all.
    :raises DataError: the file is corrupt, is of another kind, or lacks a column.
    """
    match _suffix(path):
        case ".parquet":
            yield from _read_parquet(path, fields)
        case ".arrow":
            yield from _read_arrow(path, fields)
        case suffix if suffix in JSON_LINES:
            yield from _read_json_lines(path)
        case _:
            raise DataError(f"{path} has no records; give JSON lines (.jsonl), Parquet or Arrow files")


def _suffix(path: Path) -> str:
    """Return the extension of the name without ``.gz``."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def _read_text(path: Path) -> str:
    try:
        with _open(path) as stream:
            return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}); "
            "convert it, or name JSON lines .jsonl and Parquet .parquet"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_json_lines(path: Path) -> Iterator[Record]:
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _parse_line(place, line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parse_line(place: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: this is not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: each line must be a JSON object with named fields, not {_kind(record)}")
    return record


def _read_parquet(path: Path, fields: Sequence[str] | None) -> Iterator[Record]:
    parquet = import_package("pyarrow.parquet", "reading Parquet files")
    arrow = import_package("pyarrow", "reading Parquet files")
    try:
        with parquet.ParquetFile(path) as table:
            columns = _columns(path, table.schema_arrow.names, fields)
            batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
            yield from _rows(path, batches)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _read_arrow(path: Path, fields: Sequence[str] | None) -> Iterator[Record]:
    """Yield the records of a file in the stream format, which the package ``datasets`` writes."""
    arrow = import_package("pyarrow", "reading Arrow files")
    try:
        with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as table:
            columns = _columns(path, table.schema.names, fields)
            yield from _rows(path, (batch.select(columns) for batch in table))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as an Arrow stream: {error}") from error


def _columns(path: Path, names: Sequence[str], fields: Sequence[str] | None) -> list[str]:
    wanted = list(names if fields is None else fields)
    for field in wanted:
        if field not in names:
            raise DataError(
                f'{path}: there is no column "{field}"; the columns are {_names(names)}. '
                "Name the column with the text"
            )
    return wanted


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[Record]:
    row = 0
    for batch in batches:
        for record in batch.to_pylist():
            row += 1
            yield f"{path}, row {row}", record


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


def _kind(value: object) -> str:
    return "empty (null)" if value is None else f"a {type(value).__name__}"
