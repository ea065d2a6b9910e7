"""Several hosts on one machine: network namespaces, each connected by one cable to a common switch.

The switch is a bridge in a namespace of its own. So nothing of this appears in the machine's own network,
and the addresses cannot clash with others. A cable is pulled at the switch's end: the host's interface
loses its carrier and keeps its address, packets vanish in both directions, and no TCP connection is
notified.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

NETWORK = "10.213.7"
PREFIX = "ftd"
COMMAND_S = 10.0
_NAMESPACES = Path("/run/netns")
"""Directory with the names that ``ip`` gives to network namespaces."""


def unavailable_reason() -> str | None:
    """Return why this machine cannot have such a network, or ``None`` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(command) is None:
            return f"the command {command} ({package}) is not installed"
    try:
        with NamespaceNetwork(["probe"]):
            return None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = (error.stderr or b"").decode(errors="replace").strip()
        return f"network namespaces are not permitted here: {output or error}"


def _ip(*arguments: str) -> str:
    """Run ``ip`` and return its output.

    :raises subprocess.CalledProcessError: ``ip`` failed; the error carries its output.
    """
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=COMMAND_S)
    return done.stdout.decode()


def _remove_left_behind(prefix: str) -> None:
    """Delete the namespaces that killed processes left; the names contain the process that created
    them.
    """
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(prefix).partition("-")[0]
        if name.startswith(prefix) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


class NamespaceNetwork:
    """Hosts that reach each other: ``with NamespaceNetwork(["hub", "a"]) as network``. Everything is removed
    afterwards.
    """

    def __init__(self, hosts: Sequence[str], *, prefix: str = PREFIX) -> None:
        self._owner_prefix = prefix
        self._prefix = f"{prefix}{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self._hosts = list(hosts)

    def __enter__(self) -> Self:
        _remove_left_behind(self._owner_prefix)
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

    def add(self, host: str) -> None:
        """Add a host, unless it exists."""
        if host not in self._hosts:
            self._hosts.append(host)
            self._plug_in(host)

    def namespace(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self._hosts.index(host) + 1}"

    def command(self, host: str, *command: str) -> list[str]:
        """Return the command that runs ``command`` on ``host``. ``nsenter`` replaces itself by it, so the process
        id stays the same.
        """
        return ["nsenter", f"--net={_NAMESPACES / self.namespace(host)}", *command]

    def cut(self, host: str) -> None:
        """Pull the cable of ``host``."""
        _ip("-n", self._switch, "link", "set", self._port(host), "down")

    def heal(self, host: str) -> None:
        _ip("-n", self._switch, "link", "set", self._port(host), "up")

    def _port(self, host: str) -> str:
        """Return the switch's interface to a host. Linux allows 15 characters, and a host's name may have more."""
        return f"port-{self._hosts.index(host) + 1}"

    def _plug_in(self, host: str) -> None:
        namespace = self.namespace(host)
        self._make_namespace(namespace)
        port = self._port(host)
        _ip(
            *("-n", self._switch, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", namespace),
        )
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")

    def _make_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        """Remove all namespaces, also if only some were created. Interfaces disappear with their namespaces."""
        for name in (*map(self.namespace, self._hosts), self._switch):
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                _ip("netns", "delete", name)
