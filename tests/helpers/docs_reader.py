"""A reader of the pages who types their commands."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.waiting import PATIENCE_S, until

ELSEWHERE = r"^torchrun|^export TORCH|^ftd (coordinator|node)\b|^ftd submit train|host-a:9641"
"""Pattern of commands for several hosts, which ``test_docs_hosts`` runs."""


class Reader:
    """A user with a directory, an environment, and a first terminal in which ``ftd local`` trains."""

    def __init__(self, place: Path, webhook: str) -> None:
        self.place = place
        self.runtime = place / "run"
        self.runtime.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FTD_")},
            "HOME": str(place), "XDG_CONFIG_HOME": str(place / ".config"), "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "WEBHOOK": webhook,
            "XDG_RUNTIME_DIR": str(self.runtime), "PYTHONUNBUFFERED": "1", "COLUMNS": "110",
        }  # fmt: skip
        self.background: list[tuple[str, subprocess.Popen[str], Path]] = []

    def begin(self, command: str) -> subprocess.Popen[str]:
        said = self.place / f"said-{len(self.background)}.txt"
        with said.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", command], cwd=self.place, stdin=subprocess.DEVNULL,
                env=self.environment, stdout=file, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
        self.background.append((command, process, said))
        return process

    def said(self, command: str) -> str:
        return next(
            said.read_text(errors="replace") for known, _, said in self.background if known == command
        )

    def train(self, command: str) -> None:
        """Start the cluster, wait for its first checkpoint, and note its addresses as its users do."""
        self.begin(command)
        address = self.runtime / "ftd" / "local-ftd.json"
        self.until(lambda: address.exists() and json.loads(address.read_text())["broker"], command)
        found = json.loads(address.read_text())
        url = found["broker"]
        config = self.place / "ftd.toml"
        config.write_text(f'cluster = "{found["cluster"]}"\nsecret = "s"\n[broker]\nurl = "{url}"\n')
        config.chmod(0o600)
        self.until((self.place / "checkpoints" / "gpt").exists, command)
        self.until(lambda: any((self.place / "checkpoints" / "gpt").glob("step-*")), command)
        [page] = re.findall(r"^dashboard: (\S+)/$", self.said(command), re.M)
        [broker] = re.findall(r"^broker: (\S+)$", self.said(command), re.M)
        assert broker == url
        self.environment |= {"DASHBOARD": page, "FTD_BROKER": broker}

    def until(self, holds: Any, command: str) -> None:
        until(holds, command, describe=lambda: self.said(command)[-2000:], every_s=0.1)

    def run(self, commands: list[tuple[str, str]]) -> list[str]:
        """Run commands one after the other; return a description of each that failed. Some train a model, which may
        take minutes on a busy machine: only the test's own limit ends them.
        """
        problems = []
        for page, command in commands:
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", command], cwd=self.place, env=self.environment,
                stdin=subprocess.DEVNULL, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            if done.returncode != 0:
                said = (done.stdout + done.stderr)[-1500:]
                problems.append(f"{page}: {command}\n  exit code {done.returncode}: {said}")
        return problems

    def end(self) -> None:
        for _, process, _ in self.background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for _, process, _ in self.background:
            process.wait(PATIENCE_S)
