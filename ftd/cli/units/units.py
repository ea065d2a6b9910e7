"""Texts of the installed files: units that keep the daemons running and restrict their access.

Settings are those of systemd.exec(5) and systemd.service(5); comments give the reason where it is not
obvious.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.streaming_stores import streaming_environment

Role = Literal["node", "coordinator"]
USER = "ftd"

_SANDBOX = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
# Training scripts may be in a home directory; nothing there is changed.
ProtectHome=read-only
PrivateTmp=yes
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
UMask=0077
"""

_GPUS = """\
# GPUs and fast networks, if there are any; no other devices.
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
DeviceAllow=char-infiniband* rw
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPaths:
    """Paths on the host."""

    executable: Path
    """Program ``ftd``; it uses its own virtual environment."""
    config: Path = Path("/etc/ftd/ftd.toml")
    writable: Sequence[Path] = ()
    """Directories for persistent checkpoints, besides the state directory and shared memory."""


def unit_name(role: Role) -> str:
    return f"ftd-{role}.service"


def unit_text(role: Role, layout: InstallPaths) -> str:
    """Return a hardened ``Type=notify`` unit."""
    what = "this host's node of an ftd cluster" if role == "node" else "coordinator of an ftd cluster"
    paths = "".join(f"ReadWritePaths={_quoted(path)}\n" for path in layout.writable)
    return (
        f"[Unit]\nDescription=ftd {role}: {what}\n"
        "Wants=network-online.target\nAfter=network-online.target\n"
        "# Restart it without a limit.\n"
        "StartLimitIntervalSec=0\n\n"
        f"[Service]\nType=notify\nNotifyAccess=main\nUser={USER}\nGroup={USER}\n"
        f"ExecStart={_quoted(layout.executable)} {role} --config {_quoted(layout.config).replace('$', '$$')}\n"
        f"{_NODE if role == 'node' else _COORDINATOR}"
        "Restart=always\nRestartSec=2\n"
        "# Exit code 2: the configuration is wrong, and a restart would not help.\n"
        "RestartPreventExitStatus=2\n"
        "WatchdogSec=30\nTimeoutStartSec=120\n"
        "Environment=PYTHONUNBUFFERED=1\n"
        f"{_streaming() if role == 'node' else ''}"
        "ConfigurationDirectory=ftd\nStateDirectory=ftd\nStateDirectoryMode=0700\n"
        f"{paths}\n{_SANDBOX}{_GPUS if role == 'node' else 'PrivateDevices=yes' + chr(10)}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _quoted(path: Path) -> str:
    """Return a path as one word of systemd's files, without specifiers (systemd.syntax(7), systemd.unit(5))."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if any(sign in text for sign in " \t'\"") else text


def _streaming() -> str:
    """Return variables that let large copies of snapshots bypass the caches; trainers inherit them."""
    return "".join(f"Environment={name}={value}\n" for name, value in streaming_environment({}).items())


_NODE = """\
# SIGTERM goes only to the daemon, which leaves gracefully and ends its trainers; remaining processes are killed.
KillMode=mixed
TimeoutStopSec=45
# If a trainer takes too much memory, the daemon must survive.
OOMPolicy=continue
LimitNOFILE=65536
# Pinned and shared memory for snapshots.
LimitMEMLOCK=infinity
LimitCORE=0
# Only the node has it: systemd removes it when a unit that names it stops.
RuntimeDirectory=ftd
RuntimeDirectoryMode=0700
"""

_COORDINATOR = """\
KillMode=mixed
TimeoutStopSec=20
LimitNOFILE=65536
LimitCORE=0
"""


def sysusers_text() -> str:
    """Return the sysusers.d(5) file: a system user, because logind keeps the shared memory of those (RemoveIPC)."""
    return f'u {USER} - "ftd training daemons" /var/lib/ftd\n'


def tmpfiles_text(config: Path) -> str:
    """Return the tmpfiles.d(5) file: the directories of the configuration and of snapshots in shared memory, and the
    group of the configuration, which did not exist yet when the file was written.
    """
    literal = Path(re.sub(r"[*?\[\\]", r"\\\g<0>", str(config)))  # z takes a pattern.
    return f"d /etc/ftd 0750 root {USER} -\nz {_quoted(literal)} - - {USER} -\nd /dev/shm/ftd 0700 {USER} {USER} -\n"
