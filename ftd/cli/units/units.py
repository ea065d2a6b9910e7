"""The texts of the files: units that keep the daemons running, and away from what is not theirs.

Settings are those of systemd.exec(5), systemd.service(5); the comments say why where it is not plain.
"""

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
# Training scripts may lie in a home; nothing there is changed.
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
# GPUs and fast networks, where there are any; no other devices.
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
DeviceAllow=char-infiniband* rw
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPaths:
    """Where things are on the host."""

    executable: Path
    """Of ``ftd``; its virtual environment comes with it."""
    config: Path = Path("/etc/ftd/ftd.toml")
    writable: Sequence[Path] = ()
    """Beside the state directory and shared memory: where persistent checkpoints go."""


def unit_name(role: Role) -> str:
    return f"ftd-{role}.service"


def unit_text(role: Role, layout: InstallPaths) -> str:
    """A hardened ``Type=notify`` unit."""
    what = "this host's part in an ftd cluster" if role == "node" else "coordinates an ftd cluster"
    paths = "".join(f"ReadWritePaths={path}\n" for path in layout.writable)
    return (
        f"[Unit]\nDescription=ftd {role}: {what}\n"
        "Wants=network-online.target\nAfter=network-online.target\n"
        "# It is started again for as long as it takes.\n"
        "StartLimitIntervalSec=0\n\n"
        f"[Service]\nType=notify\nNotifyAccess=main\nUser={USER}\nGroup={USER}\n"
        f"ExecStart={layout.executable} {role} --config {layout.config}\n"
        f"{_NODE if role == 'node' else _COORDINATOR}"
        "Restart=always\nRestartSec=2\n"
        "# 2: the configuration is wrong; starting again would not help.\n"
        "RestartPreventExitStatus=2\n"
        "WatchdogSec=30\nTimeoutStartSec=120\n"
        "Environment=PYTHONUNBUFFERED=1\n"
        f"{_streaming() if role == 'node' else ''}"
        "ConfigurationDirectory=ftd\nStateDirectory=ftd\nStateDirectoryMode=0700\n"
        "RuntimeDirectory=ftd\nRuntimeDirectoryMode=0700\n"
        f"{paths}\n{_SANDBOX}{_GPUS if role == 'node' else 'PrivateDevices=yes' + chr(10)}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _streaming() -> str:
    """Large copies (snapshots made, decoded, written) pass the caches by; trainers inherit it."""
    return "".join(f"Environment={name}={value}\n" for name, value in streaming_environment({}).items())


_NODE = """\
# SIGTERM to the daemon alone: it leaves in good order, its trainers with it; what is left then is killed.
KillMode=mixed
TimeoutStopSec=45
# A trainer that takes too much memory must not take the daemon along.
OOMPolicy=continue
LimitNOFILE=65536
# Pinned and shared memory for snapshots.
LimitMEMLOCK=infinity
LimitCORE=0
"""

_COORDINATOR = """\
KillMode=mixed
TimeoutStopSec=20
LimitNOFILE=65536
LimitCORE=0
"""


def sysusers_text() -> str:
    """sysusers.d(5): a system user, whose shared memory logind does not remove (RemoveIPC)."""
    return f'u {USER} - "ftd training daemons" /var/lib/ftd\n'


def tmpfiles_text() -> str:
    """tmpfiles.d(5): the configuration's directory, and the one in shared memory that snapshots live in."""
    return f"d /etc/ftd 0750 root {USER} -\nd /dev/shm/ftd 0700 {USER} {USER} -\n"
