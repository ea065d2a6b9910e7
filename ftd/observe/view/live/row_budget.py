"""Divides the rows of a terminal among the boxes of the live view."""

from dataclasses import dataclass

HEADLINE = 4
FRAME = 2
"""Rows of a box above and below its content."""
LEAST_EVENTS = 4
MAX_EVENTS = 20
MAX_NODES, MAX_PIPELINES, MAX_CHART = 12, 8, 6
_CHOICES = (
    (MAX_CHART, MAX_PIPELINES, MAX_NODES),
    (MAX_CHART, 4, MAX_NODES),
    (4, 4, MAX_NODES),
    (4, 0, MAX_NODES),
    (3, 0, 8),
    (3, 0, 6),
    (0, 0, 6),
    (0, 0, 3),
    (0, 0, 0),
)
"""Largest numbers of rows for chart, pipelines and nodes, in the order in which they are tried. The table of
nodes also shows who computes what, so the pipelines go first; only the events appear nowhere else.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """Rows of content in each box; 0 omits the box."""

    nodes: int
    chart: int
    pipelines: int
    events: int
    middle: int
    """Rows of nodes and chart with their frames; the larger of both if they are next to each other."""


def allocate_rows(height: int, *, wide: bool, nodes: int, pipelines: int) -> RowBudget:
    """Return the largest boxes that leave room for some events.

    :param wide: whether nodes and chart are next to each other.
    """
    for chart, most_pipelines, most_nodes in _CHOICES:
        # The nodes have a header, the chart has a legend, and an empty box has one line.
        node_box = FRAME + 1 + min(max(nodes, 1), most_nodes) if most_nodes else 0
        chart_box = FRAME + 1 + chart if chart else 0
        shown = min(max(pipelines, 1), most_pipelines)
        middle = max(node_box, chart_box) if wide else node_box + chart_box
        left = height - HEADLINE - middle - (FRAME + shown if shown else 0) - FRAME
        if left >= LEAST_EVENTS:
            break
    return RowBudget(
        nodes=most_nodes,
        chart=chart,
        pipelines=most_pipelines,
        events=min(max(left, 1), MAX_EVENTS),
        middle=middle,
    )
