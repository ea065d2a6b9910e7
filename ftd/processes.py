"""Child processes that cannot outlive their parent, and the tail of their log files."""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from runtime import parent

_PR_SET_CHILD_SUBREAPER = 36
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
DEVICES = Path("/dev")


def die_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes the kernel SIGKILL the child when this process ends, however it ends.

    Call it in the thread that lives as long as the process (the main thread): the kernel tracks the parent
    *thread*.
    """
    return partial(parent.die_with_parent, os.getpid())


def signal_group(pid: int, signal_number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal_number)


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return start_time(pid) is not None


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if it has ended (proc(5), ``stat``)."""
    try:
        # A name that was cut in the middle of a character is not valid UTF-8.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def read_tail(path: Path, size_bytes: int = 8192) -> str:
    """Return the last lines of a log file, at most ``size_bytes`` bytes; empty if the file does not exist."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        begin = max(0, stream.tell() - size_bytes)
        stream.seek(begin)
        text = stream.read().decode("utf-8", errors="replace")
        _, _, rest = text.partition("\n")
        return (rest if begin and rest else text).strip()
    return ""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter, ignoring modules in the current directory
    (-P).
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def become_subreaper() -> None:
    """Adopt orphaned grandchildren, so that this process can wait for them and count them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> set[int]:
    """Return the pids of this process's direct children, including zombies and adopted ones."""
    return _children_of(os.getpid())


def descendant_pids(root: int) -> set[int]:
    """Return the pids of all current descendants of ``root``, without ``root``."""
    found: set[int] = set()
    frontier = [root]
    while frontier:
        below = _children_of(frontier.pop()) - found
        found |= below
        frontier.extend(below)
    return found


def _children_of(pid: int) -> set[int]:
    """Return the children of all threads of a process that exist still; none if the process has ended."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids.update(int(child) for child in (task / "children").read_text().split())
    return pids


def reap(pids: set[int]) -> None:
    """Collect the exit status of those of ``pids`` that are dead children of this process."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def trainer_environment(device: int) -> dict[str, str]:
    """Return the variables that make a trainer see its own GPU as the first one.

    If ``CUDA_VISIBLE_DEVICES`` is set for this daemon, only those GPUs are used; none if it is empty. Trainers
    share GPUs round-robin if there are more trainers than GPUs.
    """
    if (written := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        given = [name for name in written.split(",") if name] or [""]
        return {"CUDA_VISIBLE_DEVICES": given[device % len(given)]}
    return {"CUDA_VISIBLE_DEVICES": str(device % (_gpus(DEVICES) or device + 1))}


def _gpus(devices: Path) -> int:
    """Return the number of NVIDIA GPUs of this host."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def prepare_compile_cache(directory: Path) -> dict[str, str]:
    """Create the directory of torch.compile's cache and return the environment variable that names it.

    Trainers execute what is in it, so no other user may be able to write there. If the environment of this
    process already names a directory, nothing is created or returned.

    :raises OSError: the directory cannot be created or used.
    """
    if _COMPILE_CACHE in os.environ:
        return {}
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, "the directory must be writable by this user and by nobody else")
    return {_COMPILE_CACHE: str(directory)}


def remove_stale_directories(directory: Path) -> None:
    """Remove directories of killed daemons: their name is the pid of a process that no longer exists."""
    for entry in directory.iterdir():
        if entry.name.isdigit() and not Path(f"/proc/{entry.name}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(entry)
