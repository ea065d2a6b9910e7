"""The memory that a file in a directory may still take without getting a process killed."""

import contextlib
import shutil
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62


def free_bytes(directory: Path) -> int:
    """Return the least of what the file system, the machine and this process's control groups have free.

    A memory file system counts memory as free that the machine may have given to other processes.
    Allocating it does not fail: the kernel kills a process instead.

    :raises OSError: the directory does not exist.
    """
    return min(shutil.disk_usage(directory).free, _machine_bytes(), _group_bytes())


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _NO_LIMIT


def _group_bytes() -> int:
    """Return what is left below the memory limits of this process's control group and those above it (cgroup
    v2).
    """
    try:
        own = _OWN_GROUP.read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
    except OSError:
        return _NO_LIMIT  # Another kind of system: the machine's own figure has to do.
    group, least = _GROUPS / own, _NO_LIMIT
    while group.is_relative_to(_GROUPS):
        with contextlib.suppress(OSError, ValueError):
            least = min(least, _left_in(group))
        group = group.parent
    return least


def _left_in(group: Path) -> int:
    """Return the bytes left in a control group.

    :raises OSError: the group has no memory limit.
    """
    limit = (group / "memory.max").read_text(encoding="ascii").strip()
    if limit == "max":
        return _NO_LIMIT
    used = int((group / "memory.current").read_text(encoding="ascii"))
    # The kernel gives up cached file pages as soon as memory is needed: a training that has read its data
    # set is not full.
    for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            used -= int(value)
    return max(0, int(limit) - used)
