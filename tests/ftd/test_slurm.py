"""Tests of examples/slurm/ftd.sbatch with stubs of Slurm's commands on one machine; everything else is real.

The stubs of srun, scontrol and scancel do what the script uses: a process on each "host" with its name in
``SLURMD_NODENAME``, the list of hosts, and a signal to the step.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftd.transport.mqtt.mosquitto import find_mosquitto, free_port
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "ftd.sbatch"

STUBS = {
    "scontrol": 'printf "localhost\\nhost-b\\n"',
    "srun": """
while [ "${1#--}" != "$1" ]; do shift; done
for SLURMD_NODENAME in localhost host-b; do
    export SLURMD_NODENAME
    "$@" &
    echo $! >> "$STEP"
done
wait
""",
    "scancel": 'kill -TERM $(cat "$STEP")',
}

needs_tools = pytest.mark.skipif(
    find_mosquitto() is None or shutil.which("mosquitto_passwd") is None, reason="mosquitto is not installed"
)


def environment(directory: Path) -> dict[str, str]:
    commands = directory / "bin"
    commands.mkdir()
    for name, text in STUBS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FTD_")}
    return clean | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "any",
        "FTD_PORT": str(free_port()),
        "STEP": str(directory / "step"),
    }


def run(directory: Path, job: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(job)],
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@needs_tools
def test_the_script_trains_to_the_end_and_leaves_nothing_running(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "mlp.toml").read_text().replace("steps = 200", "steps = 20")
    (tmp_path / "mlp.toml").write_text(text)
    shutil.copy(ROOT / "examples" / "mlp.py", tmp_path)
    done = run(tmp_path, tmp_path / "mlp.toml")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ftd: finished after 20 steps" in done.stderr
    assert done.stdout.startswith("mlp-")
    for secret in ("secret", "passwd", "passwords/operator", "passwords/host-b"):
        assert (tmp_path / "ftd-7" / secret).stat().st_mode & 0o077 == 0
    for pid in (tmp_path / "step").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
