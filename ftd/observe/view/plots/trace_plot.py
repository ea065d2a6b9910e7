"""Draws the trace of a run: one row for each rank, with its main thread above and its copies below.

matplotlib is imported only by modules that draw.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ftd.observe.view.files import write_file
from ftd.observe.view.plots.image import render_image
from ftd.observe.view.plots.palette import BACKWARD, FAINT, FORWARD, GREEN, INK, PAPER, RED, WAITING
from ftd.observe.view.text import format_size, plural
from ftd.observe.view.trace import WAITS, RankTrace, TraceSpan, sum_copied_bytes

SYNC, VOTE, APPLY, STALL = "#c9d1da", "#b4bec9", "#7a5ea8", RED
COPY_WAITING, COPY_OVERLAPPED = GREEN, "#8a6d3b"
MAX_ROWS = 64
_WIDTH_IN, _ROW_IN, _TOP_IN, _BOTTOM_IN, _LEFT_IN, _RIGHT_IN = 14.0, 0.72, 1.32, 0.62, 2.1, 0.3
_MAIN, _COPIER = (0.40, 0.92), (0.10, 0.34)
"""Lower and upper edge of each thread in a row of height 1."""
_STEP_LABELS = 24

Bar = tuple[float, float, str]
"""Begin, end and colour of a bar."""


def plot_trace(rows: Sequence[RankTrace], path: Path, *, name: str) -> None:
    """Write the image; the suffix names the format.

    :raises ConfigurationError: the file cannot be written.
    """
    write_file(path, render_image(lambda: draw_trace(rows, name=name), path.suffix), "--out")


def draw_trace(rows: Sequence[RankTrace], *, name: str) -> Figure:
    """Return the figure of the first ``MAX_ROWS`` ranks."""
    drawn = rows[:MAX_ROWS]
    height_in = _TOP_IN + _ROW_IN * len(drawn) + _BOTTOM_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor=PAPER)
    axes = figure.add_axes(
        (
            _LEFT_IN / _WIDTH_IN,
            _BOTTOM_IN / height_in,
            1 - (_LEFT_IN + _RIGHT_IN) / _WIDTH_IN,
            _ROW_IN * len(drawn) / height_in,
        ),
        facecolor=PAPER,
    )
    steps = [step for row in drawn for step in row.spans_of("step")]
    begin = min((step.began_us for step in steps), default=0.0)
    end = max((step.ended_us for step in steps), default=1.0)
    for index, row in enumerate(drawn):
        _draw_row(axes, row, len(drawn) - 1 - index, begin)
    axes.set_xlim(0, max(1e-3, (end - begin) / 1e3))
    axes.set_ylim(0, max(1, len(drawn)))
    _decorate(axes, drawn, begin)
    _header(figure, rows, name, height_in)
    return figure


def _draw_row(axes: Axes, row: RankTrace, level: int, begin: float) -> None:
    """Draw the bars of one rank.
    :param level: lower edge of its row.
    """
    waits = row.spans_of(*WAITS)
    main = [bar for span in row.spans if (bar := _main_bar(span)) is not None]
    copier = [(s.began_us, s.ended_us, _copy_colour(s, waits)) for s in row.spans_of("copy")]
    # The step lies below the operations that it consists of.
    _bars(axes, ((s.began_us, s.ended_us, "#f4f5f7") for s in row.spans_of("step")), level, _MAIN, begin)
    _bars(axes, main, level, _MAIN, begin)
    _bars(axes, copier, level, _COPIER, begin)


def _main_bar(span: TraceSpan) -> Bar | None:
    colours = {
        "forward": FORWARD[span.number % 2],
        "backward": BACKWARD[span.number % 2],
        "bubble": WAITING,
        "sync": SYNC,
        "vote": VOTE,
        "apply": APPLY,
        "snapshot": STALL,
        "stall": STALL,
    }
    colour = colours.get(span.kind)
    return None if colour is None else (span.began_us, span.ended_us, colour)


def _copy_colour(span: TraceSpan, waits: Sequence[TraceSpan]) -> str:
    middle = (span.began_us + span.ended_us) / 2
    return COPY_WAITING if any(w.began_us <= middle <= w.ended_us for w in waits) else COPY_OVERLAPPED


def _bars(axes: Axes, bars: Iterable[Bar], level: int, band: tuple[float, float], begin: float) -> None:
    low, high = level + band[0], level + band[1]
    corners, colours = [], []
    for began, ended, colour in bars:
        left, right = (began - begin) / 1e3, (ended - begin) / 1e3
        corners.append([(left, low), (left, high), (right, high), (right, low)])
        colours.append(colour)
    if corners:
        axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors=colours, linewidths=0.25))


def _decorate(axes: Axes, rows: Sequence[RankTrace], begin: float) -> None:
    """Add the names of the ranks, the beginnings of the steps, and the time axis."""
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_yticks([])
    for index, row in enumerate(rows):
        middle = len(rows) - 1 - index
        first, second = f"rank {row.rank}  {row.name}", row.position
        for text, height, colour in ((first, 0.70, INK), (second, 0.36, FAINT)):
            axes.annotate(
                text,
                (0, middle + height),
                xycoords=("axes fraction", "data"),
                xytext=(-8, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8.5,
                color=colour,
            )
    steps = rows[0].spans_of("step") if rows else []
    for number, step in enumerate(steps):
        at = (step.began_us - begin) / 1e3
        axes.axvline(at, color=INK, linewidth=0.6, alpha=0.35, zorder=0.5)
        if number % -(-len(steps) // _STEP_LABELS) == 0:
            axes.annotate(
                f"step {step.number}",
                (at, len(rows)),
                xytext=(3, 3),
                textcoords="offset points",
                fontsize=8,
                color=FAINT,
            )
    axes.tick_params(axis="x", colors=FAINT, labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(10))
    axes.set_xlabel("time [ms]", color=FAINT, fontsize=9)


def _header(figure: Figure, rows: Sequence[RankTrace], name: str, height_in: float) -> None:
    steps = len(set().union(*(row.steps for row in rows))) if rows else 0
    left = 0.35 / _WIDTH_IN
    title = f"{name}: {plural(steps, 'step')} on {plural(len(rows), 'rank')}"
    figure.text(left, 1 - 0.34 / height_in, title, fontsize=14, color=INK, weight="bold", va="center")
    figure.text(left, 1 - 0.64 / height_in, copied_line(rows), fontsize=9.5, color=FAINT, va="center")
    legend = [
        (FORWARD[0], "forward"),
        (BACKWARD[0], "backward"),
        (WAITING, "bubble"),
        (SYNC, "synchronises gradients"),
        (VOTE, "vote"),
        (APPLY, "optimizer"),
        (STALL, "stalls for a snapshot"),
        (COPY_WAITING, "copied while waiting"),
        (COPY_OVERLAPPED, "copied while computing"),
    ]
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for colour, label in legend],
        loc="center left",
        bbox_to_anchor=(left - 0.007, 1 - 0.93 / height_in),
        ncols=len(legend),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.3,
    )


def copied_line(rows: Sequence[RankTrace]) -> str:
    """Return a sentence about when snapshots were copied."""
    copied = sum_copied_bytes(rows)
    total = copied.total_bytes
    if not total:
        return "no snapshot was copied during the trace"
    return (
        f"{format_size(total)} copied for snapshots: {copied.waiting_bytes / total:.0%} while waiting for others, "
        f"{copied.overlapped_bytes / total:.0%} while computing, "
        f"{copied.stalled_bytes / total:.0%} while training was stalled"
    )
