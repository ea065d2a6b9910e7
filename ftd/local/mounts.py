"""Small memory file systems, so that a scenario can fill one without filling this machine's own."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ftd.errors import ConfigurationError

_COMMAND_S = 10.0


@contextlib.contextmanager
def mount_tmpfs(directory: Path, size_mib: int, field: str) -> Iterator[None]:
    """Mount a file system of ``size_mib`` at ``directory``, which is created if necessary, and unmount it at
    the end.

    :raises ConfigurationError: it cannot be mounted here.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "tmpfs", str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_S)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise ConfigurationError(
            f"a file system of {size_mib} MiB cannot be mounted: {output or error}",
            field=field,
            remedy="run it as root, or leave it out where the machine's own may be filled",
        ) from None
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False, capture_output=True, timeout=_COMMAND_S)
