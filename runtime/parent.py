"""A guarantee that no process of ftd outlives the one that started it."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGKILL to this process when process ``parent`` ends.

    The check after the call covers a parent that has died before it. Between ``fork`` and ``exec`` this function
    may be called as well: it takes no locks.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(2)


def run_child(parent: int, run: Callable[[], int | None]) -> NoReturn:
    """Call ``run`` in a forked process, which ends with process ``parent``, and exit: with the code that it returns
    (``None``: 0), or with code 1 after any error, after which the child must not continue as its parent.
    """
    code = 1
    try:
        die_with_parent(parent)
        code = run() or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):  # Nobody may read this any more.
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def exit_sentence(status: int) -> str:
    """Return how a process ended.

    :param status: exit code, or minus the number of a signal.
    """
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # Most real-time signals have no name.
            return f"killed by signal {-status}"
    return f"exited with code {status}"
