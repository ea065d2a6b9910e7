"""Reads availability traces in all formats that ftd knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ftd.replay.traces.importers.bamboo import is_bamboo, read_bamboo, read_oobleck
from ftd.replay.traces.importers.infinitehbd import is_infinitehbd, read_infinitehbd
from ftd.replay.traces.importers.lanl import is_lanl, read_lanl
from ftd.replay.traces.importers.plain_csv import is_plain_csv, read_plain_csv
from ftd.replay.traces.importers.skypilot import is_skypilot, read_skypilot
from ftd.replay.traces.importers.trace_file import ImportOptions, TraceFile
from ftd.replay.traces.trace import Trace, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """One format: how it is recognised, how it is read, and which options of the import it has."""

    recognise: Callable[[TraceFile], bool] | None
    read: Callable[[TraceFile, ImportOptions], Trace]
    options: frozenset[str] = frozenset()


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "csv": _Format(recognise=is_plain_csv, read=read_plain_csv),
        "bamboo": _Format(recognise=is_bamboo, read=read_bamboo),
        # Oobleck's artifact has Bamboo's format of events, which is recognised under Bamboo's name.
        "oobleck": _Format(recognise=None, read=read_oobleck),
        "skypilot": _Format(recognise=is_skypilot, read=read_skypilot),
        "infinitehbd": _Format(recognise=is_infinitehbd, read=read_infinitehbd, options=frozenset({"nodes"})),
        "lanl": _Format(recognise=is_lanl, read=read_lanl, options=frozenset({"nodes", "system"})),
    }
)
FORMATS = tuple(_FORMATS)


def read_trace(
    path: Path,
    format: str = "auto",  # noqa: A002  # the name of the command's option
    *,
    nodes: int | None = None,
    system: str | None = None,
    max_gap_s: float | None = None,
) -> Trace:
    """Return the trace in a file.

    :param format: one of ``FORMATS``, or ``auto`` to recognise it by the file's content.
    :param nodes: number of all nodes (``infinitehbd``, ``lanl``).
    :param system: system whose failures to read (``lanl``).
    :param max_gap_s: longest span without records that is accepted; see ``ImportOptions.max_gap_s``.
    :raises TraceError: the format is unknown or not recognised, an option does not go with it, or the file is
        wrong; names the file, the place and the remedy.
    """
    if format not in ("auto", *FORMATS):
        raise TraceError(
            f"the format {format!r} is unknown",
            field="--format",
            remedy=f"use auto or one of {', '.join(FORMATS)}",
        )
    file = TraceFile.read(path)
    name = _recognised(file) if format == "auto" else format
    for option, value in (("nodes", nodes), ("system", system)):
        if value is not None and option not in _FORMATS[name].options:
            raise file.error(f"the format {name} has no option {option}", remedy="leave the option out")
    if nodes is not None and nodes < 1:
        raise file.error(f"{nodes} is not a number of nodes", remedy="give at least 1 node")
    if max_gap_s is not None and not max_gap_s > 0:
        raise file.error(f"{max_gap_s} s is not a gap", remedy="give seconds above 0")
    return _FORMATS[name].read(file, ImportOptions(nodes=nodes, system=system, max_gap_s=max_gap_s))


def _recognised(file: TraceFile) -> str:
    """Return the name of the file's format.

    :raises TraceError: the content is that of no known format.
    """
    for name, known in _FORMATS.items():
        if known.recognise is not None and known.recognise(file):
            return name
    raise file.error("the format is not recognised", remedy=f"name it with --format: {', '.join(FORMATS)}")
