"""How much memory a file in a directory may still take, so that nobody finds out by being killed."""

import shutil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(directory: Path) -> int:
    """What the file system has, or the machine, or this process's group: whichever is least.

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
    return 1 << 62


def _group_bytes() -> int:
    """Below the memory limit of a container; of the nearest group that has one (cgroup v2)."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
        group = _CGROUP / own
        while group.is_relative_to(_CGROUP):
            limit = group / "memory.max"
            if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
                used = int((group / "memory.current").read_text(encoding="ascii"))
                return max(0, int(text) - used)
            group = group.parent
    except (OSError, ValueError):
        pass  # Another kind of system: the machine's own figure has to do.
    return 1 << 62
