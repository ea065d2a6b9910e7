"""What protects a job's snapshots on the pipelines of a preview: the groups, what each withstands, its bytes.

The groups are those of a real plan (``statemachine.cluster.snapshots.snapshots.groups_of``): maximal runs of
layers that the same stages own, one in each pipeline. So every group has as many owners as there are
pipelines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.preview import Preview
from planner.values import LayerProfile
from storage.arena import SLOTS
from storage.codes import Code, has_buddy, make_code, parse_scheme
from storage.shards import ShardLayout

KEPT_SLOTS = SLOTS - 1
"""Of an arena, but while a snapshot is complete and its predecessor not yet released."""
MOST_CODE_CELLS = 1 << 20
"""Of a code's tables: ``aec`` of 1,024 owners, within a second."""
MOST_CHECKED_OWNERS = 8
MOST_CHECKED_CELLS = 300
"""Of a bucket, for a guarantee that is tried out with every set of lost owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedGroup:
    """Layers ``[first_layer, end_layer)``, whose state so many nodes share out."""

    first_layer: int
    end_layer: int
    owners: int
    bucket_bytes: int | None
    """Parameters and optimizer of its layers; ``None`` where the profile has no bytes."""
    guarantee: int
    """So many owners, whichever, may be lost at once; under ``buddy``, so many of the owner and its buddy."""
    whole: bool = False
    """Each owner keeps all of it, whatever the scheme: the devices of a stage hold shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """What AOR takes beside snapshots, on the node with most: of parameters and optimizer state alone."""

    host_bytes: int
    """Of the node's memory: the next owner's part of both, kept current."""
    sharded_bytes: int
    """With ZeRO-1, on its devices and in its memory: parameters, its part of the state, and the replica."""
    whole_bytes: int
    """Without ZeRO-1, on its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotProtection:
    """All groups of a plan under one scheme."""

    scheme: str
    overhead: float
    """Bytes kept in all beyond what is kept without protection, per byte of that."""
    node_bytes: int | None
    """Shards of one snapshot on the fullest node; ``None`` where the profile has no bytes."""
    groups: tuple[ProtectedGroup, ...]
    buddy: bool = False
    """Groups have one owner, and another node keeps a copy of each."""
    replicas: ReplicaMemory | None = None
    """With ``aor``, where several owners share the optimizer's state out and the profile has bytes."""
    reason: str = ""
    """Why this scheme, where it was not asked for."""

    @property
    def guarantee(self) -> int:
        """The fewest losses that any group withstands."""
        return min(group.guarantee for group in self.groups)

    @property
    def arena_bytes(self) -> int | None:
        """On the fullest node: the newest snapshot, and the one under way."""
        return None if self.node_bytes is None else KEPT_SLOTS * self.node_bytes

    @property
    def arena_peak_bytes(self) -> int | None:
        """On the fullest node, while the commit of a snapshot is pending."""
        return None if self.node_bytes is None else SLOTS * self.node_bytes


def protection_of(seen: Preview, layers: tuple[LayerProfile, ...], scheme: str) -> SnapshotProtection:
    """What ``scheme`` comes to on the chosen pipelines.

    :raises ValueError: there is no such scheme, or it is not for so many owners; says which there are.
    """
    sizes = seen.instantiation.sizes
    owners = len(sizes)
    code = code_for(scheme, owners)
    # With one pipeline every group has one owner; a node beside it can keep a copy.
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
        replicas=_replicas(seen, layers) if known and owners > 1 and _has_replicas(scheme) else None,
    )


def _overhead(groups: Sequence[ProtectedGroup], code: Code) -> float:
    """By the bytes of the groups, or, where the profile has none, by their layers."""
    if not any(group.whole for group in groups):
        return code.overhead
    sizes = [group.bucket_bytes or 0 for group in groups]
    if not any(sizes):
        sizes = [group.end_layer - group.first_layer for group in groups]
    kept = [group.owners - 1 if group.whole else code.overhead for group in groups]
    return sum(size * more for size, more in zip(sizes, kept, strict=True)) / sum(sizes)


def _has_replicas(scheme: str) -> bool:
    return "aor" in {name for name, _ in parse_scheme(scheme)}


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


def _fullest_bytes(
    seen: Preview, code: Code, groups: tuple[ProtectedGroup, ...], *, buddy: bool = False
) -> int:
    """The shards of all stages of a node, and its copies, on the node with the most."""
    layouts = {group: ShardLayout(code=code, bucket_bytes=group.bucket_bytes or 0) for group in groups}
    # A shard is as long as its owner has extra cells, so most pipelines of a size are alike.
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


def code_for(scheme: str, owners: int) -> Code:
    """``make_code``, where it takes no longer than a second.

    :raises ValueError: no such scheme, or too many owners for it."""
    parts = parse_scheme(scheme)
    copies = min(sum(count for _, count in parts), owners - 1)
    cells = owners if any(name in {"aec", "aec2"} for name, _ in parts) else 1
    if owners * cells * (1 + copies) > MOST_CODE_CELLS:
        raise ValueError(f"{scheme} is too much to work out for groups of {owners} owners")
    return make_code(scheme, owners)


def _guarantee(code: Code, scheme: str) -> int:
    """Tried out where that is quick, else what the schemes are made for, which is no more."""
    if code.owners <= MOST_CHECKED_OWNERS and code.owners * code.cells <= MOST_CHECKED_CELLS:
        return code.guarantee
    return stated_guarantee(scheme, code.owners)


def stated_guarantee(scheme: str, owners: int) -> int:
    """What the parts withstand together.

    Of k + g lost owners, where k copies of everything are kept: in a row of lost ones only those behind the
    first k have no copy left, so at most g are really gone, and a code for g losses makes up for them.
    """
    parts = parse_scheme(scheme)
    parity = max({"aec": 1, "aec2": 2}.get(name, 0) for name, _ in parts)
    return min(parity + sum(count for _, count in parts), owners - 1)
