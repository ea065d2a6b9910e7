"""How much memory a file in a directory may still take, so that nobody finds out by being killed."""

import contextlib
import shutil
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62


def free_bytes(directory: Path) -> int:
    """What the file system has, or the machine, or this process's groups: whichever is least.

    A memory file system counts as free what the machine may have given to others long ago: who allocates that
    is not refused but, with luck, killed.

    :raises OSError: the directory is not there.
    """
    return min(shutil.disk_usage(directory).free, _machine_bytes(), _group_bytes())


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _NO_LIMIT


def _group_bytes() -> int:
    """Below the memory limits of a container: of this process's group and of those above it (cgroup v2)."""
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
    """:raises OSError: the group has no such limit."""
    limit = (group / "memory.max").read_text(encoding="ascii").strip()
    if limit == "max":
        return _NO_LIMIT
    used = int((group / "memory.current").read_text(encoding="ascii"))
    # Of what was read from files the kernel gives up pages as soon as memory is wanted: a training that has
    # read its data set is not full.
    for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            used -= int(value)
    return max(0, int(limit) - used)
