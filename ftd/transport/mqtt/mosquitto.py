"""A private mosquitto on this machine, for ``ftd local --broker mosquitto`` and for tests."""

import os
import shutil
import socket
import time
from pathlib import Path

from ftd.errors import ConfigurationError, UnreachableError

_PATHS = ("/usr/sbin/mosquitto", "/usr/local/sbin/mosquitto", "/opt/homebrew/sbin/mosquitto")
_PROBE_S = 0.005


def find_mosquitto() -> Path | None:
    """Return the path of mosquitto, on PATH or where packages install it for root only; ``None`` if it is not
    installed.
    """
    if found := shutil.which("mosquitto"):
        return Path(found)
    return next((Path(path) for path in _PATHS if os.access(path, os.X_OK)), None)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens at this moment. (mosquitto cannot choose a port and report it.)"""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def mosquitto_command(directory: Path, port: int, host: str = "127.0.0.1") -> list[str]:
    """Write a configuration into ``directory``, and return the command that runs it, on loopback or ``host``.

    ``set_tcp_nodelay`` saves up to 40 ms per message. The user line keeps mosquitto from changing its
    credentials when root starts it: that would clear the parent-death signal, and mosquitto would outlive
    its parent.

    :raises ConfigurationError: mosquitto is not installed.
    """
    binary = find_mosquitto()
    if binary is None:
        raise ConfigurationError(
            "mosquitto is not installed",
            field="--broker",
            remedy="install it (apt-get install mosquitto) or use --broker embedded",
        )
    path = directory / "mosquitto.conf"
    path.write_text(
        f"listener {port} {host}\n"
        "allow_anonymous true\n"
        "set_tcp_nodelay true\n"
        "persistence false\n"
        "max_queued_messages 100000\n"
        "max_inflight_messages 2000\n"
        "max_packet_size 16777216\n"
        "log_dest stderr\n"
        "log_type error\n"
        "log_type warning\n"
        "user root\n"  # This has no effect for other users.
    )
    return [str(binary), "-c", str(path)]


def await_listening(host: str, port: int, timeout_s: float) -> None:
    """Return as soon as a server accepts connections. It blocks: call it in a thread from a loop.

    :raises UnreachableError: no server accepted a connection within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=timeout_s):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnreachableError(f"no broker on {host}:{port} after {timeout_s:g} s: {error}") from None
            time.sleep(_PROBE_S)
