"""``ftd plan``: what protects snapshots, as a table and a few sentences."""

from rich.console import Group, RenderableType
from rich.text import Text

from ftd.observe.view.blocks import plain_table
from ftd.observe.view.text import format_size, layer_range, plural
from ftd.snapshots.protection import ReplicaMemory, SnapshotProtection
from storage.codes import has_buddy

MOST_GROUPS = 24
"""Lines of the table."""


def render_protection(told: SnapshotProtection) -> RenderableType:
    """The groups, and what holds for all of them."""
    owners = told.groups[0].owners
    shape = f"{told.scheme}, {plural(len(told.groups), 'group')} of {plural(owners, 'owner')}"
    table = plain_table()
    table.add_column("layers", no_wrap=True)
    for column in ("owners", "state", "may be lost"):
        table.add_column(column, justify="right", no_wrap=True)
    shown = told.groups[:MOST_GROUPS]
    for group in shown:
        table.add_row(
            layer_range(group.first_layer, group.end_layer),
            str(group.owners),
            "–" if group.bucket_bytes is None else format_size(group.bucket_bytes),
            _lost(told, group.guarantee),
        )
    hidden = len(told.groups) - len(shown)
    more = [Text(f"… and {plural(hidden, 'more group')}", style="dim")] if hidden else []
    title = Text.assemble(("Snapshots", "bold"), (f"  {shape}", "dim"))
    return Group("", title, table, *more, *map(Text, _sentences(told)))


def _lost(told: SnapshotProtection, guarantee: int) -> str:
    if told.buddy:
        return "owner or buddy"
    return f"any {guarantee}" if guarantee else "none"


def _sentences(told: SnapshotProtection) -> list[str]:
    lines = [f"chosen: {told.reason}"] if told.reason else []
    lines.append(_guarantee_line(told))
    if told.node_bytes is not None and told.arena_bytes is not None and told.arena_peak_bytes is not None:
        lines.append(
            f"{format_size(told.node_bytes)} a snapshot on the fullest node; its arenas take "
            f"{format_size(told.arena_bytes)}, and {format_size(told.arena_peak_bytes)} while a commit is pending"
        )
    lines.append(
        f"{told.overhead:.1%} more than unprotected" if told.overhead else "no bytes beyond the state"
    )
    return lines + ([] if told.replicas is None else _replica_lines(told.replicas, told.groups[0].owners))


def _replica_lines(kept: ReplicaMemory, owners: int) -> list[str]:
    """AOR beside the snapshots: what it withstands, what it takes, and where it takes more than it saves."""
    lines = [
        "aor: any node of a group may be lost while it trains, and nothing is done again; its replicas take "
        f"{format_size(kept.host_bytes)} of the fullest node's memory"
    ]
    if kept.sharded_bytes >= kept.whole_bytes:
        lines.append(
            f"with {owners} owners zero1 and aor take {format_size(kept.sharded_bytes)} of that node's devices and "
            f"memory, and {format_size(kept.whole_bytes)} are enough without: unless the devices are too small, set "
            "zero1 = false and take aec"
        )
    return lines


def _guarantee_line(told: SnapshotProtection) -> str:
    alone = [group for group in told.groups if group.owners == 1]
    if alone:
        which = f"layers {layer_range(alone[0].first_layer, alone[-1].end_layer)}"
        if told.buddy:
            return f"{which} have one owner each: its buddy, the next node, has a copy; not both may be lost"
        if has_buddy(told.scheme):
            return f"{which} have one owner and there is no other node: unprotected; no node may be lost"
        return f"{which} have one owner: no redundancy without buddy; no node may be lost"
    if not told.guarantee:
        return "no node of a group may be lost; trainers and daemons may"
    return f"any {plural(told.guarantee, 'node')} of a group may be lost"
