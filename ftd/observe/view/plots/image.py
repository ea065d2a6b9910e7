"""Images of figures, as bytes."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_STYLE = {"svg.hashsalt": "ftd", "svg.fonttype": "none"}


def render_image(draw: Callable[[], Figure], kind: str, style: dict[str, Any] | None = None) -> bytes:
    """Return the image of a figure; the same figure always gives the same bytes.

    :param kind: suffix of the format, ``.svg`` or ``.png``.
    :param style: parameters of matplotlib while the figure is drawn.
    """
    buffer = io.BytesIO()
    kind = kind.lower().removeprefix(".")
    with mpl.rc_context(_STYLE | (style or {})):
        draw().savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
