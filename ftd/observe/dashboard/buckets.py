"""Buckets of the newest snapshot: their layers, the nodes that hold them, and which losses they survive.

The state names the snapshot's generation. The pipelines of that generation (from ``PlanChosen``, or from
the state if the generation is current) say who owned which layers. The buckets follow from them, as in
``statemachine.cluster.snapshots.snapshots.groups_of``.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ftd.snapshots.protection import stated_guarantee
from storage.codes import parse_scheme

Json = dict[str, Any]

MAX_OWNERS = 64
"""Number of a bucket's owners that the page names; further ones are counted."""
MAX_BUCKETS = 256


def list_buckets(pipelines: Sequence[Json], protection: str, replica_peers: Mapping[str, str]) -> list[Json]:
    """Return the maximal runs of layers with the same owners, one owner in each pipeline."""
    cuts = sorted({0, *(stage["end_layer"] for p in pipelines for stage in p["stages"])})
    found: list[Json] = []
    for first, end in pairwise(cuts):
        owners = [_owner(pipeline, first) for pipeline in pipelines]
        peer = replica_peers.get(owners[0])
        found.append(
            {
                "first_layer": first,
                "end_layer": end,
                "owners": owners[:MAX_OWNERS],
                "more": max(0, len(owners) - MAX_OWNERS),
                "share": describe_share(protection, len(owners)),
                "tolerance": describe_tolerance(protection, len(owners), replica_peer=peer),
                "replica_peer": peer if len(owners) == 1 else None,
            }
        )
    return found[:MAX_BUCKETS]


def describe_share(protection: str, owners: int) -> str:
    """Return a text for what an owner holds of its bucket in memory."""
    parts = dict(_parts(protection))
    if owners == 1:
        return "all of it"
    words = [f"1/{owners} of it"]
    if copies := min(parts.get("arc", 0), owners - 1):
        words.append(
            "a copy of the next owner's part" if copies == 1 else f"copies of the next {copies} owners' parts"
        )
    if "aec2" in parts:
        words.append("two parities of the other parts")
    elif "aec" in parts:
        words.append("parity of the other parts")
    if "aor" in protection.split("+"):
        words.append("the next owner's optimizer state, kept current")
    return ", ".join(words)


def describe_tolerance(protection: str, owners: int, *, replica_peer: str | None) -> str:
    """Return a text for what may be lost while the snapshot stays complete."""
    if replica_peer is not None and owners == 1:
        return f"its loss: {replica_peer} holds a copy"
    try:
        losses = stated_guarantee(protection, owners)
    except ValueError:
        losses = 0
    if losses < 1:
        return "no loss" if owners > 1 else "no loss: only one node has it"
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
