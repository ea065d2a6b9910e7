"""A guarantee that no process of ftd outlives the one that started it."""

import ctypes
import os
import signal

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
