"""Tracebacks that begin with the user's own code and leave out ftd's frames before it."""

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from runtime.import_conflicts import OUR_PACKAGES

_ROOT = Path(__file__).resolve().parents[1]
_SKIPPED = (*(f"{_ROOT / package}/" for package in OUR_PACKAGES), f"{sysconfig.get_path('stdlib')}/", "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")


def user_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` from the first frame that is neither ours nor a library's; all of it
    if there is none.

    It ends with a line break, as with :func:`traceback.format_exception`.
    """
    start = _first_of_user(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, start))


def describe_error(error: BaseException) -> str:
    """Return ``OSError: no file (mine.py, line 12, in __getitem__)``, with the user's innermost line."""
    frame = error.__traceback__
    innermost = None
    while frame is not None:
        if innermost is None or _is_users(frame) or not _is_users(innermost):
            innermost = frame
        frame = frame.tb_next
    message = f"{type(error).__name__}: {error}"
    if innermost is None:
        return message
    code = innermost.tb_frame.f_code
    return f"{message} ({Path(code.co_filename).name}, line {innermost.tb_lineno}, in {code.co_name})"


def _first_of_user(frame: TracebackType | None) -> TracebackType | None:
    while frame is not None and not _is_users(frame):
        frame = frame.tb_next
    return frame


def _is_users(frame: TracebackType) -> bool:
    path = frame.tb_frame.f_code.co_filename
    return not path.startswith(_SKIPPED) and not any(part in path for part in _INSTALLED)
