"""Python code that a test runs in a process of its own."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
THREADS = 3
_THREADS = ThreadPoolExecutor(THREADS)


def run_python(code: str) -> str:
    """Return what the code prints.

    :raises AssertionError: it fails, or its process is ended by a signal.
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def call_in_threads(call: Callable[[], T]) -> list[T]:
    """Call from three threads at the same moment, and return the three results. The threads take turns as often as
    Python allows, and are the same in each call, because new ones do not begin at the same moment.
    """
    sys.setswitchinterval(1e-6)
    barrier = Barrier(THREADS)

    def call_when_all_are_here(_: int) -> T:
        barrier.wait(60)
        return call()

    return list(_THREADS.map(call_when_all_are_here, range(THREADS)))
