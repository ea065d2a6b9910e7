"""The scheduling of the tests, in a run of pytest with the options of ``make test``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
HOOK = "from tests.helpers.scheduling import pytest_xdist_make_scheduler"
PASSES = "def test_{number}():\n    time.sleep(0.02)\n"
CRASHES_ONCE = """
def test_crashes_once():
    mark = Path("crashed")
    if not mark.exists():
        mark.touch()
        os.abort()
"""
TESTS_PER_FILE = [1 if number % 3 else 6 for number in range(60)]
CRASHING_FILE = 30


def test_every_test_runs_although_one_ends_its_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOK)
    for number, tests in enumerate(TESTS_PER_FILE):
        content = "import os, time\nfrom pathlib import Path\n"
        content += "".join(PASSES.format(number=test) for test in range(tests))
        content += CRASHES_ONCE if number == CRASHING_FILE else ""
        (tmp_path / f"test_{number:02}.py").write_text(content)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    [options] = re.findall(
        r"^test:.*\n(?:\t.*\n)*?\t\$\(BIN\)/pytest (.*)", (ROOT / "Makefile").read_text(), re.M
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{sum(TESTS_PER_FILE) + 1} passed, 1 rerun" in done.stdout
