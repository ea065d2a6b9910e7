"""The place where people find the log of a daemon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftd.logs import LOG_VARIABLE

ASK = [sys.executable, "-c", "from ftd.logs import log_location; print(log_location())"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("variable", "expected"), [(None, "node.log"), ("/kept/node.log", "/kept/node.log"), ("", "")]
)
def test_the_log_is_the_file_of_stderr_unless_its_starter_says_otherwise(
    tmp_path: Path, variable: str | None, expected: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != LOG_VARIABLE}
    if variable is not None:
        environment[LOG_VARIABLE] = variable
    with (tmp_path / "node.log").open("w") as log:
        done = subprocess.run(ASK, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
    assert done.stdout.strip() == (str(tmp_path / expected) if expected == "node.log" else expected)


@pytest.mark.processes
def test_the_journal_is_named_by_its_unit(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom ftd.logs import log_location\nfrom pathlib import Path\n"
        "found = os.fstat(2)\nos.environ['JOURNAL_STREAM'] = f'{found.st_dev}:{found.st_ino}'\n"
        "Path.read_text = lambda self: '0::/system.slice/ftd-node.service\\n'\nprint(log_location())"
    )
    environment = {name: value for name, value in os.environ.items() if name != LOG_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "journalctl -u ftd-node.service"
