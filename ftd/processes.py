"""Child processes that cannot outlive their parent, and the bounded tail of what they said."""

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
DEVICES = Path("/dev")


def die_with_parent() -> Callable[[], None]:
    """A ``preexec_fn``: the kernel SIGKILLs the child when this process ends, however it ends.

    The parent may die between ``fork`` and ``prctl``; then no signal would ever come, so the child looks
    at its parent afterwards. Call it in the thread that lives as long as the process (the main thread):
    the kernel means the parent *thread*.
    """
    parent = os.getpid()
    prctl = _LIBC.prctl
    sigkill = int(signal.SIGKILL)

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, sigkill)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def signal_group(pid: int, signal_number: int) -> bool:
    """Signal a whole process group; ``False`` when it is gone."""
    try:
        os.killpg(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def is_alive(pid: int) -> bool:
    """Exists, and is not just waiting to be buried by whoever adopted it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def read_tail(path: Path, size_bytes: int = 8192) -> str:
    """The last lines of a log file, at most ``size_bytes`` of them; empty when there is none."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        begin = max(0, stream.tell() - size_bytes)
        stream.seek(begin)
        said = stream.read().decode("utf-8", errors="replace")
        _, _, rest = said.partition("\n")
        return (rest if begin and rest else said).strip()
    return ""


def module_command(module: str, *arguments: str) -> list[str]:
    """Run a module with this very interpreter, and no module of that name in the current directory (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def become_subreaper() -> None:
    """Become the parent of grandchildren whose parent dies, so that they can be waited for and counted."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> set[int]:
    """Pids of this process's direct children, zombies and adopted ones included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pids.update(int(pid) for pid in (task / "children").read_text().split())
    return pids


def descendant_pids(root: int) -> set[int]:
    """Pids of all processes below ``root`` at this moment, without ``root``."""
    found: set[int] = set()
    frontier = [root]
    while frontier:
        pid = frontier.pop()
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                below = {int(child) for child in (task / "children").read_text().split()} - found
                found |= below
                frontier.extend(below)
    return found


def reap(pids: set[int]) -> None:
    """Take the exit status of those among ``pids`` that are dead children of this process."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def trainer_environment(device: int) -> dict[str, str]:
    """Each trainer sees its own GPU as the first: of those this daemon was given, where it was given some.

    Where there are fewer GPUs than trainers these share them in turn.
    """
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if given:
        return {"CUDA_VISIBLE_DEVICES": given[device % len(given)]}
    return {"CUDA_VISIBLE_DEVICES": str(device % (_gpus(DEVICES) or device + 1))}


def _gpus(devices: Path) -> int:
    """Return how many GPUs of NVIDIA this host has."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def prepare_compile_cache(directory: Path) -> dict[str, str]:
    """Make the directory where trainers find what torch.compile made before; return their variables for it.

    Trainers execute what is in it, so no other user may write there. A directory that this process' environment
    names already is left as it is.

    :raises OSError: it cannot be made or used.
    """
    if _COMPILE_CACHE in os.environ:
        return {}
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, "this user, and nobody else, must be able to write there")
    return {_COMPILE_CACHE: str(directory)}


def remove_stale_directories(directory: Path) -> None:
    """What daemons that were killed left here: directories named after processes that are gone."""
    for entry in directory.iterdir():
        if entry.name.isdigit() and not Path(f"/proc/{entry.name}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(entry)
