"""Processes forked from one that has imported torch: real ones, without seconds of imports each."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

ZYGOTE = """
import json, os, sys, traceback
import torch, torch.distributed, torch.distributed.fsdp, torch.nn.parallel, aiohttp.web
import torch._dynamo  # otherwise each process does so at its first optimizer step
import ftd.snapshots.snapshot_agent.daemon
from ftd import Snapshotter

def child(order):
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1), os.dup2(out, 2)
    os.environ.update(order["env"])
    sys.argv = ["script", *order["argv"]]
    status = 1
    try:
        exec(compile(order["code"], "script", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)

for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    else:
        answer = os.fork() or child(order)
    print(answer, flush=True)
"""


class Forked:
    """A forked process; its output goes to a file."""

    def __init__(self, zygote: "Zygote", pid: int, out: Path) -> None:
        self._zygote, self.pid, self.out = zygote, pid, out
        self.code: int | None = None

    def wait(self) -> int:
        if self.code is None:
            self.code = self._zygote.ask({"wait": self.pid})
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    @property
    def alive(self) -> bool:
        if self.code is not None:
            return False
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    @property
    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""


class Zygote:
    """The process that all others are forked from.

    :param preamble: code that it runs first, such as further imports.
    """

    def __init__(self, preamble: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", preamble + ZYGOTE],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, code: str, out: Path, *argv: str, **env: str) -> Forked:
        return Forked(self, self.ask({"code": code, "out": str(out), "argv": argv, "env": env}), out)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
