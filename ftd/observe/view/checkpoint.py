"""``ftd checkpoint``: what is kept, and whether it is sound, as tables."""

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ftd.observe.view.blocks import plain_table
from ftd.observe.view.text import JsonMap, format_size


def render_checkpoints(told: JsonMap) -> RenderableType:
    """:param told: what ``ftd checkpoint list --json`` prints."""
    if not told["checkpoints"]:
        return Group(Text(f"{told['url']} has no complete checkpoint"), *_passed_over(told))
    table = plain_table()
    table.add_column("step", justify="right")
    table.add_column("written")
    for name in ("layers", "size", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("job", "model", "ftd"):
        table.add_column(name, no_wrap=True)
    for one in told["checkpoints"]:
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
    return Group(table, *_passed_over(told))


def render_verified(told: JsonMap) -> RenderableType:
    """:param told: what ``ftd checkpoint verify --json`` prints."""
    lines: list[Any] = []
    for one in told["checkpoints"]:
        damage = one["problems"]
        word = ("sound", "green") if not damage else ("DAMAGED", "bold red")
        lines.append(Text.assemble(f"step {one['step']}  ", word, f"  {format_size(one['size_bytes'])}"))
        lines += [Text(f"  {problem}") for problem in damage]
    return Group(*lines, *_passed_over(told))


def _passed_over(told: JsonMap) -> list[Text]:
    damaged = [Text(problem, style="yellow") for problem in told["problems"]]
    return damaged + [Text(one, style="dim") for one in told["unfinished"]]
