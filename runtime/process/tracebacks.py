"""A traceback as its reader wants it: from the user's first line on, without the way that led there."""

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

_ROOMS = ("ftd", "planner", "runtime", "statemachine", "storage")
_ROOT = Path(__file__).resolve().parents[2]
_PASSED_OVER = (*(f"{_ROOT / room}/" for room in _ROOMS), f"{sysconfig.get_path('stdlib')}/", "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")


def users_traceback(error: BaseException) -> str:
    """The traceback of ``error`` from the first frame that is neither ours nor a library's; whole if none is.

    Ends with a line break, as :func:`traceback.format_exception` does.
    """
    start = _first_of_user(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, start))


def _first_of_user(frame: TracebackType | None) -> TracebackType | None:
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if not path.startswith(_PASSED_OVER) and not any(part in path for part in _INSTALLED):
            return frame
        frame = frame.tb_next
    return None
