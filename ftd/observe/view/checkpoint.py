"""Renders the output of ``ftd checkpoint``: stored checkpoints, and whether they are intact."""

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ftd.observe.view.blocks import add_numbers, plain_table
from ftd.observe.view.text import JsonMap, format_size


def render_checkpoints(document: JsonMap) -> RenderableType:
    """Return the table of checkpoints.
    :param document: what ``ftd checkpoint list --json`` prints.
    """
    if not document["checkpoints"]:
        return Group(Text(f"{document['url']} has no complete checkpoint"), *_ignored_lines(document))
    table = plain_table()
    table.add_column("step", justify="right")
    table.add_column("written")
    add_numbers(table, "layers", "size", "loss")
    for name in ("job", "model", "ftd"):
        table.add_column(name, no_wrap=True)
    for one in document["checkpoints"]:
        loss = (one["vote"] or {}).get("loss")
        table.add_row(
            str(one["step"]),
            datetime.fromtimestamp(one["written_at"]).strftime("%Y-%m-%d %H:%M:%S"),
            str(one["layers"]),
            format_size(one["size_bytes"]),
            "–" if loss is None else f"{loss:.4f}",
            one["job"],
            one["fingerprint"][:8],
            one["ftd_version"],
        )
    return Group(table, *_ignored_lines(document))


def render_verified(document: JsonMap) -> RenderableType:
    """Return a line for each checkpoint.
    :param document: what ``ftd checkpoint verify --json`` prints.
    """
    lines: list[Any] = []
    for one in document["checkpoints"]:
        problems = one["problems"]
        verdict = ("sound", "green") if not problems else ("DAMAGED", "bold red")
        lines.append(Text.assemble(f"step {one['step']}  ", verdict, f"  {format_size(one['size_bytes'])}"))
        lines += [Text(f"  {problem}") for problem in problems]
    return Group(*lines, *_ignored_lines(document))


def _ignored_lines(document: JsonMap) -> list[Text]:
    damaged = [Text(problem, style="yellow") for problem in document["problems"]]
    return damaged + [Text(one, style="dim") for one in document["unfinished"]]
