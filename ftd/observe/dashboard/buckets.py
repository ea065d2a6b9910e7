"""Buckets of the newest snapshot: which layers, which nodes keep them, and what that withstands.

The state names the snapshot's generation. The pipelines of that generation (``PlanChosen``, or the
state while it is the present one) say who owned which layers; from them follow the buckets, as in
``statemachine.cluster.snapshots.snapshots.groups_of``.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ftd.snapshots.protection import stated_guarantee
from storage.codes import parse_scheme

Json = dict[str, Any]

MOST_OWNERS = 64
"""Of a bucket, named on the page; the rest is counted."""
MOST_BUCKETS = 256


def buckets(pipelines: Sequence[Json], protection: str, buddies: Mapping[str, str]) -> list[Json]:
    """Maximal runs of layers with the same owners, one in each pipeline."""
    cuts = sorted({0, *(stage["end_layer"] for p in pipelines for stage in p["stages"])})
    found: list[Json] = []
    for first, end in pairwise(cuts):
        owners = [_owner(pipeline, first) for pipeline in pipelines]
        found.append(
            {
                "first_layer": first,
                "end_layer": end,
                "owners": owners[:MOST_OWNERS],
                "more": max(0, len(owners) - MOST_OWNERS),
                "keeps": what_each_keeps(protection, len(owners)),
                "withstands": withstands(protection, len(owners), buddy=buddies.get(owners[0])),
                "buddy": buddies.get(owners[0]) if len(owners) == 1 else None,
            }
        )
    return found[:MOST_BUCKETS]


def what_each_keeps(protection: str, owners: int) -> str:
    """In words, what an owner's memory holds of its bucket."""
    parts = dict(_parts(protection))
    if owners == 1:
        return "all of it"
    words = [f"1/{owners} of it"]
    if copies := min(parts.get("arc", 0), owners - 1):
        words.append("a copy of the next owner's" if copies == 1 else f"copies of the next {copies} owners'")
    if "aec2" in parts:
        words.append("two parities of the others'")
    elif "aec" in parts:
        words.append("parity of the others'")
    if "aor" in protection.split("+"):
        words.append("the next owner's optimizer state, kept current")
    return ", ".join(words)


def withstands(protection: str, owners: int, *, buddy: str | None) -> str:
    """In words, what may be lost with the snapshot still whole."""
    if buddy is not None and owners == 1:
        return f"its loss: {buddy} keeps a copy"
    try:
        losses = stated_guarantee(protection, owners)
    except ValueError:
        losses = 0
    if losses < 1:
        return "no loss" if owners > 1 else "no loss: one node alone has it"
    return "the loss of any one owner" if losses == 1 else f"the loss of any {losses} owners"


def _owner(pipeline: Json, layer: int) -> str:
    for stage in pipeline["stages"]:
        if stage["first_layer"] <= layer < stage["end_layer"]:
            return str(stage["devices"][0]).rpartition("/")[0]
    return "?"


def _parts(protection: str) -> list[tuple[str, int]]:
    try:
        return parse_scheme(protection)
    except ValueError:
        return []
