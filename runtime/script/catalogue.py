"""Which snapshots of a run can be restored from what is left in the memory of some hosts, and from whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.wire.keeper_protocol import Held, Key, Layout
from storage.codes import make_code, parse_scheme, recipe


def code_of(protection: str) -> str:
    """The scheme of ``storage.codes`` for what a script asks for: ``buddy`` is a copy on the next host."""
    return "+".join("arc:1" if part.strip() == "buddy" else part.strip() for part in protection.split("+"))


def losses_of(scheme: str) -> int:
    """Hosts that may be lost, where there are enough of them.

    :raises ValueError: no protection of a script's snapshots.
    """
    parts = parse_scheme(scheme, ("none", "aec", "aec2"))
    return sum({"none": 0, "arc": count, "aec": 1, "aec2": 2}[name] for name, count in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """A snapshot that all ranks can have."""

    key: Key
    layout: Layout
    """Of some rank's: what they have in common counts."""
    own: dict[int, tuple[str, ...]]
    """Rank of then → who has what is its own."""
    shards: dict[int, str]
    """Owner → who has its shard."""

    def source_of(self, rank: int) -> int:
        """The rank of then whose own part a rank of now takes: its own, while there was one."""
        return rank % self.layout.ranks


def restorable(held: Sequence[Held], ranks: int) -> tuple[list[Restorable], list[tuple[Key, str]]]:
    """What ``ranks`` ranks can restore, the newest first; and what they cannot, with the reason."""
    by_key: dict[Key, list[Held]] = {}
    for one in held:
        by_key.setdefault(one.key, []).append(one)
    found: list[Restorable] = []
    refused: list[tuple[Key, str]] = []
    for key in sorted(by_key, reverse=True):
        made = _looked_at(key, by_key[key], ranks)
        if isinstance(made, Restorable):
            found.append(made)
        else:
            refused.append((key, made))
    return found, refused


def other_ranks(written: int, ranks: int) -> str:
    """Why what so many ranks kept is not restored on another number."""
    return (
        f"it is of {written} ranks, and there are {ranks}: what each rank kept for itself is not cut anew; "
        f"start with {written} ranks again. Another number can go on where DDP's ranks of several hosts were "
        "protected (protection=), and from a checkpoint that can be resharded (torch.distributed.checkpoint)"
    )


def _looked_at(key: Key, held: Sequence[Held], ranks: int) -> Restorable | str:
    layout = held[0].layout
    common = _common(layout)
    if any(_common(one.layout) != common for one in held):
        return "its parts do not fit together"
    if layout.ranks != ranks and not layout.shared_bytes:
        return other_ranks(layout.ranks, ranks)
    own: dict[int, tuple[str, ...]] = {}
    for one in held:
        own[one.layout.rank] = (*own.get(one.layout.rank, ()), one.address)
    shards = {one.layout.owner: one.address for one in held if one.layout.owner >= 0 and not one.copy}
    missing = sorted({rank % layout.ranks for rank in range(ranks)} - set(own))
    if missing:
        return f"what was rank {', '.join(map(str, missing[:5]))}'s own is lost"
    if layout.shared_bytes:
        lost = frozenset(range(layout.owners)) - set(shards)
        if recipe(make_code(layout.scheme, layout.owners), lost) is None:
            return (
                f"the shards of {len(lost)} of {layout.owners} hosts are lost: too many for {layout.scheme}"
            )
    return Restorable(key=key, layout=layout, own=own, shards=shards)


def _common(layout: Layout) -> tuple[int, int, str, int]:
    return layout.ranks, layout.shared_bytes, layout.scheme, layout.owners
