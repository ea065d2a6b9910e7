"""Real clusters for benchmarks: ``ftd local`` with default settings, as a user runs it, and its report."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

REPOSITORY = Path(__file__).parent.parent
FTD = Path(sys.executable).parent / "ftd"

LIMIT_S = 1800.0
Fault = dict[str, Any]
"""One ``[[fault]]`` table of a chaos scenario."""
Report = dict[str, Any]


def toml_table(fault: Fault) -> str:
    lines = ["[[fault]]"]
    for key, value in fault.items():
        lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def run_local(
    job: Path,
    *,
    nodes: int,
    steps: int,
    faults: list[Fault],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Report:
    """Run a job with ``ftd local`` to its end and return its report.

    :param environment: variables that set keys of ``ftd.toml`` for the daemons.
    :raises RuntimeError: the run failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="ftd-bench-") as directory:
        scenario = Path(directory) / "scenario.toml"
        scenario.write_text("\n".join(toml_table(fault) for fault in faults))
        report = Path(directory) / "report.json"
        command = [
            str(FTD), "local", str(job), "--nodes", str(nodes), "--steps", str(steps),
            "--broker", "mosquitto", "--report", str(report), "--no-view",
        ]  # fmt: skip
        if faults:
            command += ["--chaos", str(scenario)]
        with subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            try:
                printed, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                printed, _ = process.communicate(timeout=60)
                raise RuntimeError(f"no end after {LIMIT_S} s:\n{printed[-3000:]}") from None
            except BaseException:
                process.send_signal(signal.SIGINT)  # An interrupted benchmark leaves no cluster running.
                raise
        if process.returncode != 0 or not report.exists():
            raise RuntimeError(f"ftd local ended with {process.returncode}:\n{printed[-3000:]}")
        document: Report = json.loads(report.read_text())
        return document
