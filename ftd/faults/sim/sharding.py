"""ZeRO-1 in the simulated world: which parts a rank keeps, and who sends what to whom."""

from collections.abc import Iterable, Mapping

from planner.values import Device, StatePart
from statemachine.cluster.rules import owned_layers
from statemachine.cluster.sharding import owned_parts
from statemachine.messages.cluster import Resume

Parts = Mapping[StatePart, int]
"""The state version of each part."""


def is_sharded(resume: Resume) -> bool:
    return bool(resume.held_parts)


def all_of(layers: dict[int, int]) -> dict[StatePart, int]:
    """Return whole layers as parts."""
    return {StatePart(layer=layer, start=0, end=1, of=1): version for layer, version in layers.items()}


def kept_parts(resume: Resume, device: Device) -> frozenset[StatePart]:
    """Return the parts that ``device`` keeps under the plan: its own, and with ``aor`` also the next owner's."""
    replicas = "aor" in resume.protection and len(resume.plan.pipelines) > 1
    return frozenset(
        part for part in owned_parts(resume.plan, device, zero1=True) if replicas or not part.replica
    )


def moves(resume: Resume, layers: int) -> list[tuple[int, tuple[int, ...], int]]:
    """Return (layer, ranks that together have all of it, rank that needs it) of every transfer. Owners come
    before replicas.
    """
    devices = resume.plan.devices
    rank_of = {device: rank for rank, device in enumerate(devices)}
    held: dict[int, list[tuple[bool, int, StatePart]]] = {layer: [] for layer in range(layers)}
    whole: set[tuple[int, int]] = set()
    for run in resume.held_parts:
        rank = rank_of[run.device]
        for layer in range(run.first_layer, run.end_layer):
            part = StatePart(layer=layer, start=run.start, end=run.end, of=run.of, replica=run.replica)
            held[layer].append((run.replica, rank, part))
            if run.whole:
                whole.add((layer, rank))
    found: list[tuple[int, tuple[int, ...], int]] = []
    owned = owned_layers(resume.plan)
    for device, rank in rank_of.items():
        kept = kept_parts(resume, device)
        for layer in sorted(owned[device]):
            own = {part for _, holder, part in held[layer] if holder == rank}
            here = (layer, rank) in whole
            if here and {part for part in kept if part.layer == layer} <= own:
                continue
            found.append((layer, _holders(held[layer], rank), rank))
    return found


def _holders(held: Iterable[tuple[bool, int, StatePart]], rank: int) -> tuple[int, ...]:
    """Return the ranks that together hold a layer: the rank itself first, then owners, then replicas, until
    nothing is missing.
    """
    parts: dict[int, list[StatePart]] = {}
    for _, holder, part in sorted(held, key=lambda entry: (entry[1] != rank, entry[0], entry[1], entry[2])):
        if _is_complete(parts.values()):
            break
        parts.setdefault(holder, []).append(part)
    return tuple(parts)


def _is_complete(parts: Iterable[list[StatePart]]) -> bool:
    """Return whether parts of one layer cover it."""
    reached, of = 0, 1
    for part in sorted((part for listed in parts for part in listed), key=lambda part: part.start / part.of):
        if part.start * of > reached * part.of:
            return False
        if part.end * of > reached * part.of:
            reached, of = part.end, part.of
    return reached == of
