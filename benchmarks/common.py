"""Shared parts of the benchmarks: facts about the machine, medians with spread, tables, JSON and limits."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
EVALUATION = RESULTS / "evaluation"
"""Results that are part of the repository, because documentation pages are generated from them."""
LOAD_BEFORE = os.getloadavg()[0]
"""Load average of the machine before the benchmark itself adds to it."""


def machine() -> dict[str, Any]:
    """Return facts about this machine and its packages, so that you can judge whether two results are comparable."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    packages = {}
    for name in ("torch", "aiomqtt", "numpy", "scipy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_before": LOAD_BEFORE,
        "python": platform.python_version(),
        "packages": packages,
        "commit": commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str:
    """Return the commit that is measured, marked as dirty when the work tree differs from it."""
    root = Path(__file__).parent.parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Minimum, median, and maximum of a sample; ``values`` keeps the sample itself."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if not self.values:
            return "–"
        low, high = min(self.values), max(self.values)
        digits = 1 if high < 1000 else 0
        return f"{low:.{digits}f} / {self.median:.{digits}f} / {high:.{digits}f}"


def milliseconds(seconds: Iterable[float]) -> str:
    """Return minimum, median and maximum in milliseconds."""
    return str(Summary(values=tuple(1e3 * s for s in seconds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A figure that the project promises: ``measured`` must not exceed (or fall below) ``limit``."""

    name: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass(slots=True, kw_only=True)
class Result:
    """Result of one benchmark: rows and notes to read, ``data`` and limits for tools."""

    name: str
    what: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def finish(self, out: Path | None = None) -> int:
        """Print the result, write it as JSON and return the exit code, which is 1 when a limit is missed."""
        console = Console(width=max(100, Console().width))
        console.print(self.what, style="bold", highlight=False)
        table = Table()
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)
        for limit in self.limits:
            mark = "[green]met[/]" if limit.met else "[red]MISSED[/]"
            sign = "≥" if limit.at_least else "≤"
            console.print(f"  {mark}  {limit.name}: {limit.measured:.4g} (limit {sign} {limit.limit:g})")
        path = out or RESULTS / f"{self.name}.json"
        where = self.save(path)["machine"]
        console.print(
            f"  on {where['cores']} cores, {where['cpu']}, load {where['load_before']:.1f}", style="dim"
        )
        console.print(f"  written to {path}", style="dim", highlight=False)
        return 0 if all(limit.met for limit in self.limits) else 1

    def save(self, path: Path) -> dict[str, Any]:
        """Write the result as JSON and return what was written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {
            "schema": 1,
            "benchmark": self.name,
            "what": self.what,
            "machine": machine(),
            "columns": self.columns,
            "rows": self.rows,
            "limits": [{**asdict(limit), "met": limit.met} for limit in self.limits],
            "data": self.data,
            "notes": self.notes,
        }
        path.write_text(json.dumps(document, indent=2) + "\n")
        return document


def command_line(what: str | None, out: str = "JSON file to write") -> argparse.ArgumentParser:
    """Return a parser that prints ``what`` without rewrapping it and has the option ``--out``.

    :param out: help of that option.
    """
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=out)
    return parser


def main(result: Result, out: Path | None = None) -> None:
    """Print and write the result, and end the process with the benchmark's exit code."""
    sys.exit(result.finish(out))
