"""A progress bar for what takes longer than one likes to look at nothing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PATIENCE_S = 1.0


@contextmanager
def delayed_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields what is to be told how much is done, and of how much. From the second second on a bar shows it,
    on stderr, if that is a terminal; nothing of it stays."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(what, total=None)

    def told(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    timer = threading.Timer(_PATIENCE_S, progress.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield told
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
            progress.stop()
