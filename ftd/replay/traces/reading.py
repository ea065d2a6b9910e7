"""Reads availability traces in all formats that ftd knows."""

from pathlib import Path

from ftd.replay.traces.importers.plain_csv import is_plain_csv, read_plain_csv
from ftd.replay.traces.importers.trace_file import TraceFile
from ftd.replay.traces.trace import Trace, TraceError

FORMATS = ("csv",)


def read_trace(path: Path, format: str = "auto") -> Trace:  # noqa: A002  # the name of the command's option
    """Return the trace in a file.

    :param format: one of ``FORMATS``, or ``auto`` to recognise it by the file's content.
    :raises TraceError: the format is unknown, or the file is wrong; names the file, the place and the remedy.
    """
    if format not in ("auto", *FORMATS):
        raise TraceError(
            f"the format {format!r} is unknown", remedy=f"use auto or one of {', '.join(FORMATS)}"
        )
    file = TraceFile.read(path)
    if format == "auto" and not is_plain_csv(file):
        raise file.error(
            "the format is not recognised", remedy=f"name it; the known formats are {', '.join(FORMATS)}"
        )
    return read_plain_csv(file)
