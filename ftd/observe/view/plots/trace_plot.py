"""A run's own trace as a picture: one row for each rank, above what its main thread did, below its copies.

matplotlib is imported only here, where something is drawn.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ftd.observe.view.files import write_file
from ftd.observe.view.plots.palette import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, RED, WAITING
from ftd.observe.view.text import format_size, plural
from ftd.observe.view.trace import WAITS, CopiedBytes, RankTrace, TraceSpan, copied

FORWARD = (BLUE, "#4ba3d6")
"""Even and odd microbatches, so that neighbours without a gap are told apart."""
BACKWARD = (ORANGE, "#f3c766")
SYNC, VOTE, APPLY, STALL = "#c9d1da", "#b4bec9", "#7a5ea8", RED
COPY_WAITING, COPY_BESIDE = GREEN, "#8a6d3b"
MOST_ROWS = 64
_WIDTH_IN, _ROW_IN, _TOP_IN, _BOTTOM_IN, _LEFT_IN, _RIGHT_IN = 14.0, 0.72, 1.32, 0.62, 2.1, 0.3
_MAIN, _COPIER = (0.40, 0.92), (0.10, 0.34)
"""Where in a row of height 1 the two threads are drawn, from bottom to top."""
_STEP_LABELS = 24

Bar = tuple[float, float, str]
"""From, to, colour."""


def plot_trace(rows: Sequence[RankTrace], path: Path, *, name: str) -> None:
    """Write the picture; the suffix says the format.

    :raises ConfigurationError: the place cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    picture = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "ftd", "svg.fonttype": "none"}):
        metadata = {"Date": None} if kind == "svg" else None
        draw_trace(rows, name=name).savefig(picture, format=kind, dpi=150, metadata=metadata)
    write_file(path, picture.getvalue(), "--out")


def draw_trace(rows: Sequence[RankTrace], *, name: str) -> Figure:
    """The first ``MOST_ROWS`` ranks."""
    drawn = rows[:MOST_ROWS]
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
    steps = [step for row in drawn for step in row.of("step")]
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
    """``level``: its lower edge."""
    waits = row.of(*WAITS)
    main = [bar for span in row.spans if (bar := _main_bar(span)) is not None]
    copier = [(s.began_us, s.ended_us, _copy_colour(s, waits)) for s in row.of("copy")]
    # The step first: what it consists of lies upon it.
    _bars(axes, ((s.began_us, s.ended_us, "#f4f5f7") for s in row.of("step")), level, _MAIN, begin)
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
    return COPY_WAITING if any(w.began_us <= middle <= w.ended_us for w in waits) else COPY_BESIDE


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
    """Names of ranks, beginnings of steps, the scale."""
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_yticks([])
    for index, row in enumerate(rows):
        middle = len(rows) - 1 - index
        first, second = f"rank {row.rank}  {row.name}", row.place
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
    steps = rows[0].of("step") if rows else []
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
        (BLUE, "forward"),
        (ORANGE, "backward"),
        (WAITING, "bubble"),
        (SYNC, "waits for sums"),
        (VOTE, "vote"),
        (APPLY, "optimizer"),
        (STALL, "stands still for a snapshot"),
        (COPY_WAITING, "copied in a wait"),
        (COPY_BESIDE, "copied beside computing"),
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
    """Where the copies fell, in a sentence."""
    parts = [copied(row) for row in rows]
    total = sum(part.total_bytes for part in parts)
    if not total:
        return "no snapshot was copied meanwhile"
    shares = CopiedBytes(
        waiting_bytes=sum(part.waiting_bytes for part in parts),
        beside_bytes=sum(part.beside_bytes for part in parts),
        stalled_bytes=sum(part.stalled_bytes for part in parts),
    )
    return (
        f"{format_size(total)} read for snapshots: {shares.waiting_bytes / total:.0%} while waiting for others, "
        f"{shares.beside_bytes / total:.0%} beside computing, "
        f"{shares.stalled_bytes / total:.0%} while training stood still"
    )
