"""The protection of a job's snapshots on the pipelines of a preview: the groups, the losses each withstands, and
its bytes.

The groups are those of a real plan (``statemachine.cluster.snapshots.snapshots.groups_of``): maximal runs
of layers that the same stages own, one stage in each pipeline. So every group has as many owners as there
are pipelines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.preview import Preview
from planner.values import LayerProfile
from storage.arena import SLOTS
from storage.codes import Code, has_buddy, make_code, parse_scheme
from storage.shards import ShardLayout

HELD_SLOTS = SLOTS - 1
"""Slots of an arena that hold a snapshot, except between a commit and the release of its predecessor."""
MOST_CODE_CELLS = 1 << 20
"""Largest size of a code's tables: ``aec`` of 1,024 owners, which takes less than a second."""
MOST_CHECKED_OWNERS = 8
MOST_CHECKED_CELLS = 300
"""Largest number of cells of a bucket whose guarantee is computed from every set of lost owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedGroup:
    """Layers ``[first_layer, end_layer)``, whose state is divided among ``owners`` nodes."""

    first_layer: int
    end_layer: int
    owners: int
    bucket_bytes: int | None
    """Bytes of the parameters and optimizer state of its layers; ``None`` where the profile has no bytes."""
    guarantee: int
    """Number of owners that may be lost at once, whichever they are; under ``buddy``, of the owner and its
    replica peer.
    """
    whole: bool = False
    """Whether each owner holds all of it under any scheme, because the devices of a stage hold shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """Memory for AOR replicas on the node with the most, for parameters and optimizer state alone."""

    host_bytes: int
    """Bytes of the node's memory: the next owner's part of both, kept current."""
    sharded_bytes: int
    """Bytes with ZeRO-1, on its devices and in its memory: parameters, its part of the state, and the replica."""
    whole_bytes: int
    """Bytes without ZeRO-1, on its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProtection:
    """All groups of a plan under one scheme."""

    scheme: str
    overhead: float
    """Bytes held in addition to those held without protection, as a fraction of the latter."""
    node_bytes: int | None
    """Bytes of the shards of one snapshot on the fullest node; ``None`` where the profile has no bytes."""
    groups: tuple[ProtectedGroup, ...]
    buddy: bool = False
    """Whether the groups have one owner each and another node holds a copy."""
    replicas: ReplicaMemory | None = None
    """Memory for replicas under ``aor``; ``None`` with one owner or without bytes in the profile."""
    reason: str = ""
    """Reason for which this scheme was chosen; empty where the job asked for it."""

    @property
    def guarantee(self) -> int:
        """Fewest losses that any group withstands."""
        return min(group.guarantee for group in self.groups)

    @property
    def arena_bytes(self) -> int | None:
        """Bytes on the fullest node for the newest snapshot and the one being written."""
        return None if self.node_bytes is None else HELD_SLOTS * self.node_bytes

    @property
    def arena_peak_bytes(self) -> int | None:
        """Bytes on the fullest node while the commit of a snapshot is pending."""
        return None if self.node_bytes is None else SLOTS * self.node_bytes


def describe_protection(seen: Preview, layers: tuple[LayerProfile, ...], scheme: str) -> SnapshotProtection:
    """Return what ``scheme`` withstands and costs on the chosen pipelines.

    :raises ValueError: there is no such scheme, or it does not support so many owners; the message lists
        the schemes.
    """
    sizes = seen.instantiation.sizes
    owners = len(sizes)
    code = make_bounded_code(scheme, owners)
    replicated = owners > 1 and "aor" in {name for name, _ in parse_scheme(scheme)}
    # With one pipeline every group has one owner; another node can hold a copy.
    buddy = owners == 1 and seen.nodes > 1 and has_buddy(scheme)
    guarantee = 1 if buddy else _guarantee(code, scheme)
    templates = [seen.templates[size] for size in set(sizes)]
    cuts = sorted({0, *(stage.end_layer for template in templates for stage in template.stages)})
    known = any(layer.state_bytes for layer in layers)
    sharded = [
        range(stage.first_layer, stage.end_layer)
        for template in templates
        for stage in template.stages
        if stage.within != "replicate" and stage.devices > 1 and not seen.costs.policy.zero1
    ]
    groups = tuple(
        ProtectedGroup(
            first_layer=first,
            end_layer=end,
            owners=owners,
            bucket_bytes=sum(layer.state_bytes for layer in layers[first:end]) if known else None,
            guarantee=owners - 1 if whole and owners > 1 else guarantee,
            whole=whole,
        )
        for first, end in pairwise(cuts)
        for whole in [any(first in run for run in sharded)]
    )
    return SnapshotProtection(
        scheme=scheme,
        overhead=1.0 if buddy else _overhead(groups, code),
        node_bytes=_fullest_bytes(seen, code, groups, buddy=buddy) if known else None,
        groups=groups,
        buddy=buddy,
        replicas=_replicas(seen, layers) if known and replicated else None,
    )


def _overhead(groups: Sequence[ProtectedGroup], code: Code) -> float:
    """Return the overhead by the bytes of the groups or, where the profile has none, by their layers."""
    if not any(group.whole for group in groups):
        return code.overhead
    sizes = [group.bucket_bytes or 0 for group in groups]
    if not any(sizes):
        sizes = [group.end_layer - group.first_layer for group in groups]
    kept = [group.owners - 1 if group.whole else code.overhead for group in groups]
    return sum(size * more for size, more in zip(sizes, kept, strict=True)) / sum(sizes)


def _replicas(seen: Preview, layers: tuple[LayerProfile, ...]) -> ReplicaMemory:
    owners = len(seen.instantiation.sizes)
    found = []
    for size in set(seen.instantiation.sizes):
        nodes = [(0, 0)] * size
        for stage in seen.templates[size].stages:
            of_stage = layers[stage.first_layer : stage.end_layer]
            parameters, states = nodes[stage.node_offset]
            parameters += sum(layer.parameter_bytes for layer in of_stage)
            states += sum(layer.optimizer_bytes for layer in of_stage)
            nodes[stage.node_offset] = parameters, states
        for parameters, states in nodes:
            host = -(-(parameters + states) // owners)
            whole = parameters + states
            sharded = parameters + -(-states // owners) + host
            found.append(ReplicaMemory(host_bytes=host, sharded_bytes=sharded, whole_bytes=whole))
    return max(found, key=lambda one: one.sharded_bytes)


def _fullest_bytes(seen: Preview, code: Code, groups: tuple[ProtectedGroup, ...], *, buddy: bool) -> int:
    """Return the bytes of the shards and copies on the node with the most."""
    layouts = {group: ShardLayout(code=code, bucket_bytes=group.bucket_bytes or 0) for group in groups}
    # The length of a shard depends on its owner's number of extra cells only, so most pipelines of a size
    # are equal.
    alike = {(size, len(code.extra[owner])): owner for owner, size in enumerate(seen.instantiation.sizes)}
    fullest = 0
    for (size, _), owner in alike.items():
        nodes = [0] * size
        for stage in seen.templates[size].stages:
            for group, layout in layouts.items():
                if stage.first_layer <= group.first_layer < stage.end_layer:
                    kept = layout.bucket_bytes if group.whole else layout.shard_bytes(owner)
                    nodes[stage.node_offset] += kept
        if buddy:
            nodes += [0] if seen.nodes > size else []
            nodes = [own + copy for own, copy in zip(nodes, [nodes[-1], *nodes[:-1]], strict=True)]
        fullest = max(fullest, *nodes)
    return fullest


def make_bounded_code(scheme: str, owners: int) -> Code:
    """Return the code of a scheme, if it can be made within a second.

    :raises ValueError: there is no such scheme, or it has too many owners.
    """
    parts = parse_scheme(scheme)
    copies = min(sum(count for _, count in parts), owners - 1)
    cells = owners if any(name in {"aec", "aec2"} for name, _ in parts) else 1
    if owners * cells * (1 + copies) > MOST_CODE_CELLS:
        raise ValueError(f"{scheme} is too much to work out for groups of {owners} owners")
    return make_code(scheme, owners)


def _guarantee(code: Code, scheme: str) -> int:
    """Compute the guarantee where that is quick; otherwise return the stated one, which is not larger."""
    if code.owners <= MOST_CHECKED_OWNERS and code.owners * code.cells <= MOST_CHECKED_CELLS:
        return code.guarantee
    return stated_guarantee(scheme, code.owners)


def stated_guarantee(scheme: str, owners: int) -> int:
    """Return the number of losses that the joined schemes withstand by construction.

    Let k + g owners be lost where k copies of everything exist. In a row of lost owners, only those after
    the first k have no copy left. So the segments of at most g owners are lost, and a code for g losses
    decodes them.
    """
    parts = parse_scheme(scheme)
    parity = max({"aec": 1, "aec2": 2}.get(name, 0) for name, _ in parts)
    return min(parity + sum(count for _, count in parts), owners - 1)
