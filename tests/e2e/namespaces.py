"""Several hosts on one machine: network namespaces, each with one cable to a common switch.

The switch is a bridge in a namespace of its own, so nothing of all this appears in the machine's own
network, and the addresses cannot clash with anybody's. A cable is pulled at the switch's end: the host's
interface loses its carrier and keeps its address, packets vanish in both directions, and no TCP
connection hears of it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from ftd.node.processes import die_with_parent, tail

NETWORK = "10.213.7"
PREFIX = "ftdtest"
COMMAND_S = 10.0
GONE_S = 5.0


def why_not() -> str | None:
    """Why this machine cannot have such a network; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    try:
        with Network(["probe"]):
            return None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        return f"network namespaces are not permitted here: {said or error}"


def _ip(*arguments: str) -> str:
    """:raises subprocess.CalledProcessError: carries what ip said."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=COMMAND_S)
    return done.stdout.decode()


def _remove_left_behind() -> None:
    """Namespaces of test runs that were killed: their names say which process made them."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        maker = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and maker.isdigit() and not Path(f"/proc/{maker}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


class Network:
    """``with Network(["hub", "a"]) as network``: hosts that reach each other; all gone afterwards."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self._hosts = list(hosts)

    def __enter__(self) -> Self:
        _remove_left_behind()
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove)
            self._make_namespace(self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for host in self._hosts:
                self._plug_in(host)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def namespace(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self._hosts.index(host) + 1}"

    def command(self, host: str, *command: str) -> list[str]:
        """The command that runs ``command`` on ``host``; ip becomes it, so that the process is the same."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def cut(self, host: str) -> None:
        """Pull the cable of ``host``."""
        _ip("-n", self._switch, "link", "set", host, "down")

    def heal(self, host: str) -> None:
        _ip("-n", self._switch, "link", "set", host, "up")

    def pids(self, host: str) -> set[int]:
        """Processes that run on ``host``."""
        return {int(pid) for pid in _ip("netns", "pids", self.namespace(host)).split()}

    def _plug_in(self, host: str) -> None:
        namespace = self.namespace(host)
        self._make_namespace(namespace)
        # The switch calls each port by the name of the host at the other end.
        _ip(
            *("-n", self._switch, "link", "add", host, "type", "veth"),
            *("peer", "name", "eth0", "netns", namespace),
        )
        _ip("-n", self._switch, "link", "set", host, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")

    def _make_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        """Also after half of it was made. Interfaces go with their namespaces."""
        for name in (*map(self.namespace, self._hosts), self._switch):
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                _ip("netns", "delete", name)


class Programs:
    """Processes on the hosts of a network: ended, with all that they started, when this is closed."""

    def __init__(self, network: Network, hosts: Sequence[str], logs: Path) -> None:
        self._network = network
        self._hosts = list(hosts)
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: str, command: Sequence[str]) -> Path:
        """Start ``command`` on ``host``; the answer is the file that its output goes to."""
        output = self._logs / f"{name}.out"
        with output.open("wb") as out, (self._logs / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                self._network.command(host, *command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509  # prctl and getppid take no locks
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
        return output

    def ended(self) -> list[str]:
        """Those that should run and do not."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def tails(self) -> str:
        files = [self._logs / f"{name}.log" for name in self._running]
        return "\n".join(f"--- {file.stem}\n{text}" for file in files if (text := tail(file, 1500)))

    def close(self, grace_s: float) -> None:
        """SIGTERM, and for what is left on the hosts after ``grace_s`` SIGKILL.

        :raises RuntimeError: something survived that, too.
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
        deadline = time.monotonic() + GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            raise RuntimeError(f"processes {sorted(left)} did not end within {GONE_S:g} s of SIGKILL")

    def _left(self) -> set[int]:
        """Processes on the hosts: all of them are ours, since the hosts are."""
        for process in self._running.values():
            process.poll()
        return set().union(*(self._network.pids(host) for host in self._hosts))


@contextlib.contextmanager
def programs(hosts: Sequence[str], logs: Path, grace_s: float = 3.0) -> Iterator[tuple[Network, Programs]]:
    """A network, and processes on it; nothing of either is left."""
    with Network(hosts) as network:
        running = Programs(network, hosts, logs)
        try:
            yield network, running
        finally:
            running.close(grace_s)
