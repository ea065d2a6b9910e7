"""The processes of a cluster on one machine: starting them, and ending them so that none is left."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftd.errors import PeerError
from ftd.logs import LOG_VARIABLE
from ftd.processes import (
    become_subreaper,
    child_pids,
    descendant_pids,
    die_with_parent,
    is_alive,
    reap,
    signal_group,
)

_KILL_TIMEOUT_S = 5.0
_REAP_TIMEOUT_S = 5.0
"""Longest time to wait for a killed process to be gone before another one of the same name starts."""
_MAX_BASE_LENGTH = 30
# Unmount first what a scenario mounted there (``ftd.local.mounts``).
_CLEANUP_SCRIPT = 'read _; sleep 0.2; umount -l "$0/disk" "$1" 2>/dev/null; rm -rf -- "$0" "$1"'


def shared_memory(directory: Path) -> Path:
    """Return where the nodes of a cluster in ``directory`` hold snapshots: in shared memory if there is any."""
    memory = Path("/dev/shm")
    return memory / directory.name if memory.is_dir() else directory / "snapshots"


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a private directory with a short path (a unix socket's path has at most 107 bytes), and remove it
    afterwards.

    Even a SIGKILL of this process leaves nothing: a small shell waits for the end of a pipe that only this
    process holds open, and then removes the directory.
    """
    usual = tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="ftd-", dir=usual if len(usual) <= _MAX_BASE_LENGTH else "/tmp"))
    reading, writing = os.pipe()
    cleaner = subprocess.Popen(
        ["/bin/sh", "-c", _CLEANUP_SCRIPT, str(path), str(shared_memory(path))],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reading)
    try:
        yield path
    finally:
        for directory in (path, shared_memory(path)):
            shutil.rmtree(directory, ignore_errors=True)
        cleaner.kill()
        cleaner.wait()
        os.close(writing)


def _inherited_environment() -> dict[str, str]:
    """Return this process's environment without the variables that would point daemons at another cluster."""
    others = ("FTD_BROKER", "FTD_CLUSTER", "FTD_SECRET")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


@dataclass(slots=True, kw_only=True)
class ChildProcess:
    """One process of the cluster, leader of its own process group."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None


@dataclass(slots=True, kw_only=True)
class ChildProcesses:
    """The child processes of one cluster: starts, signals and ends them.

    Children die with this process (parent-death signal), and this process adopts the orphans of a killed
    child. So the kernel itself confirms at the end that no child is left.
    """

    logs: Path
    environment: dict[str, str] = field(default_factory=dict)
    kept_logs: Path | None = None
    """Directory in which ``logs`` will be kept; ``None``: they are deleted in the end."""
    children: dict[str, ChildProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        become_subreaper()

    async def start(self, name: str, command: Sequence[str], *, inherit: Sequence[int] = ()) -> ChildProcess:
        """Start a process. Its output is appended to ``<name>.log``.

        :param inherit: file descriptors that it inherits under the same numbers.
        :raises PeerError: a process of this name is running, or the program cannot be started.
        """
        if self.running(name):
            # It may have been killed a moment ago, and its end may not have been noticed yet.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.children[name].process.wait(), _REAP_TIMEOUT_S)
        if self.running(name):
            raise PeerError(f"{name} is running already")
        log = self.logs / f"{name}.log"
        kept = "" if self.kept_logs is None else str(self.kept_logs.absolute() / log.name)
        with log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                    pass_fds=tuple(inherit),
                    env={**_inherited_environment(), LOG_VARIABLE: kept, **self.environment},
                )
            except OSError as error:
                raise PeerError(f"cannot start {name} ({command[0]}): {error.strerror}") from error
        child = ChildProcess(name=name, process=process, log=log)
        self.children[name] = child
        return child

    def running(self, name: str) -> bool:
        return name in self.children and self.children[name].running

    async def kill(self, name: str) -> None:
        """SIGKILL the process group of ``name`` and wait until its leader has ended."""
        child = self.children[name]
        signal_group(child.pid, signal.SIGKILL)
        await child.process.wait()

    async def terminate(self, names: Sequence[str], grace_s: float) -> None:
        """Send SIGTERM to these processes, and kill those that are still running after ``grace_s``."""
        leaving = [self.children[name] for name in names if self.running(name)]
        for child in leaving:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        if leaving:
            await asyncio.wait([asyncio.ensure_future(c.process.wait()) for c in leaving], timeout=grace_s)
        for child in leaving:
            if child.running:
                await self.kill(child.name)

    def reap_adopted(self) -> None:
        """Reap the processes that killed nodes left, because nothing else waits for them."""
        reap(child_pids() - {child.pid for child in self.children.values()})

    async def end(self) -> None:
        """SIGKILL everything below this process, and wait until it is gone."""
        own = {child.pid for child in self.children.values()}
        below = {pid for root in child_pids() & own for pid in descendant_pids(root)} | (child_pids() & own)
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        for child in self.children.values():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), max(0.1, deadline - time.monotonic()))
        while (left := {pid for pid in below if is_alive(pid)}) and time.monotonic() < deadline:
            self.reap_adopted()
            await asyncio.sleep(0.01)
        if left:
            raise PeerError(f"processes {sorted(left)} did not end within {_KILL_TIMEOUT_S:g} s of SIGKILL")
