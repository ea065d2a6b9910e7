"""How the rows of a terminal are shared out among the boxes of the live view."""

from dataclasses import dataclass

HEADLINE = 4
FRAME = 2
"""Of a box: above and below what is in it."""
LEAST_EVENTS = 4
MOST_EVENTS = 20
MOST_NODES, MOST_PIPELINES, MOST_CHART = 12, 8, 6
_POORER = (
    (MOST_CHART, MOST_PIPELINES, MOST_NODES),
    (MOST_CHART, 4, MOST_NODES),
    (4, 4, MOST_NODES),
    (4, 0, MOST_NODES),
    (3, 0, 8),
    (3, 0, 6),
    (0, 0, 6),
    (0, 0, 3),
    (0, 0, 0),
)
"""Rows of chart, pipelines and nodes at most, the richest first. Who computes what stands beside the nodes,
too; what happened stands nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """Of what is in each box; 0: there is no box."""

    nodes: int
    chart: int
    pipelines: int
    events: int
    middle: int
    """Nodes and chart with their frames: the higher one where they are side by side."""


def rows_for(height: int, *, wide: bool, nodes: int, pipelines: int) -> RowBudget:
    """The richest picture that leaves room for some events.

    :param wide: nodes and chart are side by side.
    """
    for chart, most_pipelines, most_nodes in _POORER:
        # A head above the nodes, a legend below the chart, and a line where there is nothing yet.
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
        events=min(max(left, 1), MOST_EVENTS),
        middle=middle,
    )
