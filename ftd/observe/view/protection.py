"""Renders how ``ftd plan`` protects snapshots: a table and a few sentences."""

from rich.console import Group, RenderableType
from rich.text import Text

from ftd.observe.view.blocks import add_numbers, plain_table
from ftd.observe.view.text import format_size, layer_range, plural
from ftd.snapshots.protection import ReplicaMemory, SnapshotProtection
from storage.codes import has_buddy

MAX_GROUPS = 24
"""Largest number of rows."""


def render_protection(described: SnapshotProtection) -> RenderableType:
    """Return the groups and the properties that hold for all of them."""
    owners = described.groups[0].owners
    shape = f"{described.scheme}, {plural(len(described.groups), 'group')} of {plural(owners, 'owner')}"
    table = plain_table()
    table.add_column("layers", no_wrap=True)
    add_numbers(table, "owners", "state", "may be lost")
    shown = described.groups[:MAX_GROUPS]
    for group in shown:
        table.add_row(
            layer_range(group.first_layer, group.end_layer),
            str(group.owners),
            "–" if group.bucket_bytes is None else format_size(group.bucket_bytes),
            _lost(described, group.guarantee),
        )
    hidden = len(described.groups) - len(shown)
    more = [Text(f"… and {plural(hidden, 'more group')}", style="dim")] if hidden else []
    title = Text.assemble(("Snapshots", "bold"), (f"  {shape}", "dim"))
    return Group("", title, table, *more, *map(Text, _sentences(described)))


def _lost(described: SnapshotProtection, guarantee: int) -> str:
    if described.buddy:
        return "owner or its peer"
    return f"any {guarantee}" if guarantee else "none"


def _sentences(described: SnapshotProtection) -> list[str]:
    lines = [f"chosen: {described.reason}"] if described.reason else []
    lines.append(_guarantee_line(described))
    if (
        described.node_bytes is not None
        and described.arena_bytes is not None
        and described.arena_peak_bytes is not None
    ):
        lines.append(
            f"{format_size(described.node_bytes)} for each snapshot on the fullest node; its arenas take "
            f"{format_size(described.arena_bytes)}, and {format_size(described.arena_peak_bytes)} while a commit "
            "is pending"
        )
    lines.append(
        f"{described.overhead:.1%} more than unprotected"
        if described.overhead
        else "no bytes beyond the state"
    )
    return lines + (
        [] if described.replicas is None else _replica_lines(described.replicas, described.groups[0].owners)
    )


def _replica_lines(aor: ReplicaMemory, owners: int) -> list[str]:
    """Return sentences about AOR: which losses it survives, what it costs, and when it costs more than it
    saves.
    """
    lines = [
        "aor: any node of a group may be lost during training without repeating a step; its replicas take "
        f"{format_size(aor.host_bytes)} of the fullest node's memory"
    ]
    if aor.sharded_bytes >= aor.whole_bytes:
        lines.append(
            f"with {owners} owners, zero1 and aor take {format_size(aor.sharded_bytes)} of that node's device and host "
            f"memory, and {format_size(aor.whole_bytes)} without them: unless the devices are too small, set "
            "zero1 = false and use aec"
        )
    return lines


def _guarantee_line(described: SnapshotProtection) -> str:
    alone = [group for group in described.groups if group.owners == 1]
    if alone:
        which = f"layers {layer_range(alone[0].first_layer, alone[-1].end_layer)}"
        if described.buddy:
            return f"{which} have one owner each: its replica peer, the next node, has a copy; not both may be lost"
        if has_buddy(described.scheme):
            return f"{which} have one owner and there is no other node: unprotected; no node may be lost"
        return f"{which} have one owner: no redundancy without the scheme buddy; no node may be lost"
    if not described.guarantee:
        return "no node of a group may be lost; trainers and daemons may"
    return f"any {plural(described.guarantee, 'node')} of a group may be lost"
