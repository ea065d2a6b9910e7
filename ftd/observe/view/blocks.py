"""Building blocks of the live view and ``ftd status``: a table of the nodes, and the pipelines as coloured
bars.

They take the public cluster state.
"""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ftd.observe.view.text import (
    NODE_MARKS,
    JsonMap,
    NodeColours,
    device_names,
    layer_range,
    pipeline_name,
    plural,
    single_device,
    stage_node,
)
from planner.reasons import describe_within, natural_key

_NAME_WIDTH = 20
"""Least number of columns for a node's name."""


def plain_table(gap: int = 2) -> Table:
    """Return an empty table without lines.
    :param gap: blanks after each column.
    """
    return Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)


def add_numbers(table: Table, *names: str) -> None:
    """Add columns for numbers, which are aligned to the right and do not wrap."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def node_table(state: JsonMap, colours: NodeColours, *, most: int) -> RenderableType:
    """Return a table with one row for each node: its state and what it computes.

    :param most: largest number of rows; nodes in trouble come first, the rest is summed up in one line.
    """
    table = Table(box=None, padding=(0, 1), show_header=True, header_style="dim", pad_edge=False)
    nodes: dict[str, JsonMap] = state.get("nodes") or {}
    roles = _roles(state.get("pipelines") or ())
    shown = sorted(nodes, key=natural_key)
    if len(shown) > most:
        shown = sorted(shown, key=lambda n: (nodes[n]["state"] == "HEALTHY", natural_key(n)))[: most - 1]
    longest = max([len(n) for n in shown], default=4)
    # rich shrinks columns that may wrap; the cells do not wrap, so they end in an ellipsis instead.
    table.add_column("node", min_width=min(longest, _NAME_WIDTH))
    table.add_column("state", no_wrap=True, width=max(map(len, NODE_MARKS)) + 2)
    table.add_column("computes")
    for name in shown:
        node = nodes[name]
        mark, style = NODE_MARKS.get(node["state"], ("?", "white"))
        table.add_row(
            Text(name, style=f"bold {colours.of(name)}", no_wrap=True, overflow="ellipsis"),
            Text(f"{mark} {node['state']}", style=style),
            _role_text(node, roles.get(name)),
        )
    if len(shown) == len(nodes):
        return table
    rest = [node["state"] for name, node in nodes.items() if name not in shown]
    counts = ", ".join(f"{rest.count(s)} {s}" for s in sorted(set(rest)))
    return Group(table, Text(f"… and {counts}", style="dim"))


def _roles(pipelines: Sequence[JsonMap]) -> dict[str, str]:
    """Return each node's pipeline and layers, such as ``A  layers 0–3``; several stages are joined by commas."""
    roles: dict[str, list[str]] = {}
    for index, pipeline in enumerate(pipelines):
        for stage in pipeline["stages"]:
            layers = layer_range(stage["first_layer"], stage["end_layer"])
            roles_of_node = roles.setdefault(stage_node(stage), [])
            roles_of_node.append(layers if roles_of_node else f"{pipeline_name(index)}  layers {layers}")
    return {node: ", ".join(parts) for node, parts in roles.items()}


def _role_text(node: JsonMap, role: str | None) -> Text:
    waits = bool(node.get("drain_waits"))
    if node.get("draining") and not waits:
        return Text("draining", style="yellow") if node.get("in_plan") else Text("drained", style="dim")
    if node["state"] == "OFFLINE":
        return Text("–", style="dim")
    if node.get("quarantine"):
        return Text("set aside", style="red")
    if node["state"] == "UNHEALTHY":
        return Text("restarting", style="yellow")
    if node.get("in_plan") and role:
        text = Text(role, no_wrap=True, overflow="ellipsis")
        if (speed := float(node.get("speed", 1.0))) < 1:
            text.append(f"  at {speed:.0%} speed", style="yellow")
        if waits:
            text.append("  waits to leave", style="yellow")
        return text
    if waits:
        return Text("waits to leave", style="yellow")
    return Text("idle" if role is None else "waiting", style="dim")


class PipelineBars:
    """Pipelines as bars: each stage is as wide as its share of the layers and has the colour of its node."""

    def __init__(self, pipelines: Sequence[JsonMap], colours: NodeColours, *, most: int) -> None:
        self._pipelines = pipelines
        self._colours = colours
        self._most = most

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(40, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._pipelines:
            yield Text("no plan yet", style="dim")
            return
        short = single_device(self._pipelines)
        hidden = len(self._pipelines) - self._most
        shown = self._pipelines if hidden <= 0 else self._pipelines[: self._most - 1]
        tail = len(str(max(p["microbatches"] for p in self._pipelines))) + len(" ×  microbatches")
        for index, pipeline in enumerate(shown):
            yield self._bar(index, pipeline, options.max_width - 3 - tail, short=short)
        if hidden > 0:
            yield Text(f"… and {plural(len(self._pipelines) - len(shown), 'more pipeline')}", style="dim")

    def _bar(self, index: int, pipeline: JsonMap, width: int, *, short: bool) -> Text:
        stages: Sequence[JsonMap] = pipeline["stages"]
        total = stages[-1]["end_layer"]
        line = Text(no_wrap=True, overflow="crop")
        line.append(f"{pipeline_name(index):<3}", style="bold")
        room = max(width - (len(stages) - 1), len(stages) * 3)
        for position, stage in enumerate(stages):
            left = room * stage["first_layer"] // total
            right = room * stage["end_layer"] // total
            names = device_names(stage["devices"], short=short)
            label = _stage_label(stage, names, right - left)
            if position:
                line.append("▸", style="dim")
            line.append(label, style=f"black on {self._colours.of(stage_node(stage))}")
        line.append(f" × {plural(pipeline['microbatches'], 'microbatch', 'microbatches')}", style="dim")
        return line


def pipeline_lines(pipelines: Sequence[JsonMap], colours: NodeColours) -> Text:
    """Return the pipelines as text, one on each line: ``A  node-0 0–3 │ node-1 4–7  × 4``."""
    short = single_device(pipelines)
    text = Text(no_wrap=True, overflow="ellipsis")
    for index, pipeline in enumerate(pipelines):
        text.append("\n" if index else "")
        text.append(f"{pipeline_name(index):<3}", style="bold")
        for position, stage in enumerate(pipeline["stages"]):
            text.append(" │ " if position else "", style="dim")
            text.append(device_names(stage["devices"], short=short), style=colours.of(stage_node(stage)))
            text.append(f" {layer_range(stage['first_layer'], stage['end_layer'])}")
            text.append(f" {divided}" if (divided := _divided(stage)) else "", style="dim")
            text.append(" recomputing" if stage.get("recompute", "none") != "none" else "", style="dim")
        text.append(f"  × {pipeline['microbatches']}", style="dim")
    return text


def _divided(stage: JsonMap) -> str:
    """Return how the devices of the stage divide its layers; empty if they do not."""
    within = stage.get("within", "replicate")
    return "" if within == "replicate" else describe_within(within, stage.get("replicas", 1))


def _stage_label(stage: JsonMap, names: str, width: int) -> str:
    """Return the longest label that fits, centred; without room for all, the names go before the layers."""
    layers = layer_range(stage["first_layer"], stage["end_layer"])
    labels = [f"{names} · layers {layers}", f"{names} · {layers}", f"{names} {layers}", layers, ""]
    if divided := _divided(stage):
        labels[:0] = [f"{names} · layers {layers} · {divided}", f"{names} · {layers} · {divided}"]
    for label in labels:
        if len(label) <= width - (2 if width > 12 else 0):
            return label.center(width)
    return " " * width
