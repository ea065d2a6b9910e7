"""A progress bar for commands that take longer than a second."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_DELAY_S = 1.0


@contextmanager
def delayed_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes how much is done and how much there is in total.

    After the first second a bar shows the progress on stderr, if that is a terminal. It disappears at the
    end.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    timer = threading.Timer(_DELAY_S, progress.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
            progress.stop()
