"""Commands of ``ftd`` as processes, in an environment of their own."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.waiting import PATIENCE_S

FTD = [sys.executable, "-P", "-m", "ftd.cli.main"]


def ftd(*arguments: object, home: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*FTD, *map(str, arguments)]
    return subprocess.run(
        command, env=home, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )


def leftovers(home: dict[str, str]) -> list[str]:
    """Return the files that a cluster made and did not remove."""
    return [path.name for path in Path(home["TMPDIR"]).rglob("*") if path.name != "ftd"]
