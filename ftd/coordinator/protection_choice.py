"""Choice of the protection of snapshots: the cheapest scheme that withstands the requested losses and fits
into memory.

REFT §4.2 uses copies while their overhead is bearable and parity where it is not, by a profile at the
start. Here the overhead is known beforehand: for every scheme that withstands the losses, the bytes that it
stores (memory) and the bytes that it reads to make them (time: copying and XOR both run at the speed of
memory). The scheme that touches the fewest bytes is chosen, and the simpler one if two are equal: copies
are restored without decoding. If no such scheme fits into the hosts' memory, the one that withstands the
most losses among those that fit is chosen.

The number of owners is the number of pipelines, so every plan may need another scheme.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ftd.snapshots.protection import make_bounded_code, stated_guarantee
from planner.values import LayerProfile, Plan
from statemachine.cluster.snapshots.replica_peers import BUDDY, choose_replica_peers
from statemachine.cluster.snapshots.snapshots import groups_of
from statemachine.messages.values import ProtectionChoice, ProtectionRequest
from storage.arena import SLOTS
from storage.shards import ShardLayout

FullestBytes = Callable[[str], int | None]
"""Bytes of one snapshot under a scheme, on the fullest node; ``None``: the profile has no sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    scheme: str
    withstood: int
    stored: float
    """Bytes stored beyond those of the bucket, per byte of the bucket."""
    touched: float
    """Bytes read and written to make them, per byte of the bucket."""


def choose_protection(
    plan: Plan, layers: tuple[LayerProfile, ...], wish: ProtectionRequest
) -> ProtectionChoice:
    """Return the protection for the snapshots of a plan: the requested one, or the best one for the plan's
    owners.
    """
    owners = len(plan.pipelines)
    peers = choose_replica_peers(plan, BUDDY, {*plan.nodes, *plan.idle_nodes}).values()
    holding = {*plan.nodes, *peers}
    limit = min((wish.limits[node] for node in holding if wish.limits.get(node)), default=None)
    own_limit = min((wish.own_limits[node] for node in plan.nodes if node in wish.own_limits), default=None)
    fullest = partial(_fullest_bytes, plan, layers, zero1=wish.zero1)
    choose = partial(
        choose_scheme,
        owners,
        zero1=wish.zero1,
        fullest_bytes=fullest,
        limit_bytes=limit,
        own_bytes=partial(fullest, copies=False),
        own_limit_bytes=own_limit,
    )
    if wish.scheme is None:
        return choose(wish.losses, nodes=len({*plan.nodes, *plan.idle_nodes}))
    try:
        make_bounded_code(wish.scheme, owners)
    except ValueError as error:
        losses = stated_guarantee(wish.scheme, owners)
        choice = choose(losses)
        return ProtectionChoice(scheme=choice.scheme, reason=f"{error}; {choice.reason}", fallback=True)
    return ProtectionChoice(scheme=wish.scheme, reason="as requested")


def choose_scheme(
    owners: int,
    losses: int,
    *,
    zero1: bool,
    fullest_bytes: FullestBytes,
    limit_bytes: int | None,
    own_bytes: FullestBytes | None = None,
    own_limit_bytes: int | None = None,
    nodes: int = 1,
) -> ProtectionChoice:
    """Return the cheapest scheme under which any ``losses`` of the owners may be lost, and at least one if
    there are several.

    :param limit_bytes: most bytes that a node's arenas may take, for all their slots.
    :param own_bytes: as ``fullest_bytes``, without copies of other nodes' parts.
    :param own_limit_bytes: most bytes that a node's own arenas may take, if the rest is for copies.
    :param nodes: nodes that are present: a single owner of everything needs another one next to it.
    """

    def excess(scheme: str) -> str:
        """Return the reason why a scheme does not fit into a node's memory; empty: it does."""
        takes = fullest_bytes(scheme)
        if limit_bytes is not None and takes is not None and SLOTS * takes > limit_bytes:
            takes_mib, limit_mib = _mib(SLOTS * takes), _mib(limit_bytes)
            return f"{scheme} would take {takes_mib} of a node's memory, which is limited to {limit_mib}; "
        own = own_bytes(scheme) if own_bytes is not None else takes
        if own_limit_bytes is not None and own is not None and SLOTS * own > own_limit_bytes:
            own_mib, limit_mib = _mib(SLOTS * own), _mib(own_limit_bytes)
            return (
                f"{scheme} would take {own_mib} of a node's memory, where {limit_mib} are for its own snapshots "
                "and as much for copies; "
            )
        return ""

    required = min(max(1, losses), owners - 1)
    too_large = ""
    if owners == 1 and nodes > 1:
        scheme = "aor+buddy" if zero1 else "buddy"
        if not (too_large := excess(scheme)):
            why = f"{scheme}: every group has one owner, and another node holds a copy, for 100% more bytes"
            return ProtectionChoice(scheme=scheme, reason=why)
    for withstood in range(required, -1, -1):
        candidates = sorted(_candidates(withstood, owners, zero1=zero1), key=lambda one: one.touched)
        for one in candidates:
            if not (problem := excess(one.scheme)):
                others = [other for other in candidates if other.scheme != one.scheme]
                return ProtectionChoice(scheme=one.scheme, reason=too_large + _reason(one, others, owners))
            too_large = too_large or problem
    last = "aor" if zero1 else "none"
    return ProtectionChoice(scheme=last, reason=f"{too_large}so only each owner's own part is held")


def _candidates(withstood: int, owners: int, *, zero1: bool) -> Iterator[_Candidate]:
    """Yield the schemes that withstand exactly this number of losses, the simplest first."""
    for scheme in _schemes(withstood, owners, zero1=zero1):
        try:
            code = make_bounded_code(scheme, owners)
        except ValueError:
            continue
        cells = code.owners * code.cells
        read = sum(len(some) for extra in code.extra for some in extra) / cells
        yield _Candidate(
            scheme=scheme, withstood=withstood, stored=code.overhead, touched=code.overhead + read
        )


def _schemes(withstood: int, owners: int, *, zero1: bool) -> list[str]:
    if zero1:
        # Each owner holds its own part and the replica of one other owner: only these can be copied.
        return ["aor"] if withstood == 0 else ["arc:1+aor"] if withstood == 1 else []
    if withstood == 0:
        return ["none"]
    schemes = [f"arc:{withstood}", "aec" if withstood == 1 else f"aec+arc:{withstood - 1}"]
    if withstood >= 2:
        schemes.append("aec2" if withstood == 2 else f"aec2+arc:{withstood - 2}")
    return schemes


def _reason(one: _Candidate, others: list[_Candidate], owners: int) -> str:
    if owners == 1:
        return f"{one.scheme}: every group has one owner, so no other node can protect it"
    if not one.withstood:
        return f"{one.scheme}: no owner may be lost"
    reason = (
        f"{one.scheme}: any {one.withstood} of {owners} owners may be lost, for {one.stored:.0%} more bytes"
    )
    more = ", ".join(f"{other.scheme} ({other.stored:.0%})" for other in others)
    return f"{reason}; cheaper to make than {more}" if more else reason


def _fullest_bytes(
    plan: Plan, layers: tuple[LayerProfile, ...], scheme: str, *, zero1: bool, copies: bool = True
) -> int | None:
    if not any(layer.state_bytes for layer in layers):
        return None
    nodes: Counter[str] = Counter()
    replica_peers = choose_replica_peers(plan, scheme, {*plan.nodes, *plan.idle_nodes})
    for group in groups_of(plan, scheme, zero1=zero1):
        state_bytes = sum(layer.state_bytes for layer in layers[group.first_layer : group.end_layer])
        layout = ShardLayout(code=make_bounded_code(scheme, len(group.owners)), bucket_bytes=state_bytes)
        for owner, node in enumerate(group.owners):
            size_bytes = state_bytes if group.whole else layout.shard_bytes(owner)
            nodes[node] += size_bytes
            if copies and node in replica_peers:
                nodes[replica_peers[node]] += size_bytes
    return max(nodes.values())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
