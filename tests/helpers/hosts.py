"""Processes on the hosts of a network of namespaces, for tests that set a deployment up by hand."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ftd.local.namespaces import NamespaceNetwork
from ftd.processes import die_with_parent, read_tail
from tests.helpers.waiting import PATIENCE_S

PREFIX = "ftdtest"


class Programs:
    """Processes on the hosts of a network; ``close`` ends them with all their descendants."""

    def __init__(self, network: NamespaceNetwork, hosts: Sequence[str], logs: Path) -> None:
        self._network = network
        self._hosts = list(hosts)
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: str, command: Sequence[str]) -> Path:
        """Start ``command`` on ``host``, and return the file with its output."""
        output = self._logs / f"{name}.out"
        with output.open("wb") as out, (self._logs / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                self._network.command(host, *command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509  # prctl and getppid take no locks
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return output

    def ended(self) -> list[str]:
        """Return the names of the processes that have ended, though they should run."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def tails(self) -> str:
        files = [self._logs / f"{name}.log" for name in self._running]
        return "\n".join(f"--- {file.stem}\n{text}" for file in files if (text := read_tail(file, 1500)))

    def close(self, grace_s: float) -> None:
        """Send SIGTERM, and after ``grace_s`` send SIGKILL to all processes left on the hosts.

        :raises RuntimeError: a process survived that as well.
        """
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + grace_s
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            raise RuntimeError(f"processes {sorted(left)} did not end within {PATIENCE_S:g} s of SIGKILL")

    def _left(self) -> set[int]:
        """Return the processes on the hosts; all are ours, because the hosts are."""
        for process in self._running.values():
            process.poll()
        commands = [["ip", "netns", "pids", self._network.namespace(host)] for host in self._hosts]
        outputs = [subprocess.run(command, check=True, capture_output=True).stdout for command in commands]
        return {int(pid) for output in outputs for pid in output.split()}


@contextlib.contextmanager
def programs(
    hosts: Sequence[str], logs: Path, grace_s: float = 3.0
) -> Iterator[tuple[NamespaceNetwork, Programs]]:
    """Create a network and run processes on it; remove both at the end."""
    with NamespaceNetwork(hosts, prefix=PREFIX) as network:
        running = Programs(network, hosts, logs)
        try:
            yield network, running
        finally:
            running.close(grace_s)
