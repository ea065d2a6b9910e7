"""Layers in parts: which parts a plan gives to each device, and which parts each device has.

A device of a stage that shards holds its range of the stage's layers. With ZeRO-1 the owners of a layer
share out the optimizer state that they have in common: of m pipelines, the owner in the i-th one has the
range [i/m, (i + 1)/m), and with ``aor`` it also holds a replica of the next owner's range.
"""

from collections.abc import Collection, Iterable, Mapping
from math import lcm

from msgspec.structs import replace

from planner.changes.parts import FractionRange, incomplete, retained_parts, stages_by_layer
from planner.values import Device, Plan, StatePart
from statemachine.messages.values import HeldPart

Parts = Mapping[Device, Iterable[StatePart]]


def owned_parts(plan: Plan, device: Device, *, zero1: bool) -> frozenset[StatePart]:
    """Return the parts that a device of the plan holds of its layers, including replicas under ZeRO-1."""
    return parts_by_device(plan, zero1=zero1, among=(device,)).get(device, frozenset())


def parts_by_device(
    plan: Plan, *, zero1: bool, among: Collection[Device] | None = None
) -> dict[Device, frozenset[StatePart]]:
    """Return the parts that each device of the plan holds of its layers, including replicas under ZeRO-1.

    :param among: the devices that count; ``None``: all.
    """
    stages_of = stages_by_layer(plan.pipelines, plan.pipelines[0].stages[-1].end_layer)
    owned: dict[Device, set[StatePart]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for stage in pipeline.stages:
            for device in stage.devices:
                if among is not None and device not in among:
                    continue
                of_device = owned.setdefault(device, set())
                for layer in range(stage.first_layer, stage.end_layer):
                    for replica in (False, True) if zero1 else (False,):
                        runs = retained_parts(stages_of[layer], number, device, zero1=zero1, replica=replica)
                        of_device |= {_part(layer, run, replica=replica) for run in runs}
    return {device: frozenset(parts) for device, parts in owned.items()}


def _part(layer: int, held: FractionRange, *, replica: bool) -> StatePart:
    of = lcm(held[0].denominator, held[1].denominator)
    return StatePart(layer=layer, start=int(held[0] * of), end=int(held[1] * of), of=of, replica=replica)


def held_parts(plan: Plan, holdings: Mapping[Device, frozenset[int]], parts: Parts) -> tuple[HeldPart, ...]:
    """Return the parts that the devices of ``plan`` have, in runs of layers and in the order of the ranks.

    A part that the plan drops is not sent, and does not count.

    :param holdings: the layers whose parameters and buffers each device has whole.
    """
    dropped = {each.device: each.dropped for each in plan.released_layers}
    runs: list[HeldPart] = []
    for device in plan.devices:
        whole, of_device = holdings.get(device, frozenset()), len(runs)
        kept = [part for part in parts.get(device, ()) if part.layer not in dropped.get(device, ())]
        for part in sorted(kept, key=lambda p: (p.replica, p.of, p.start, p.end, p.layer)):
            run = HeldPart(
                device=device,
                first_layer=part.layer,
                end_layer=part.layer + 1,
                start=part.start,
                end=part.end,
                of=part.of,
                replica=part.replica,
                whole=part.layer in whole,
            )
            last = runs[-1] if len(runs) > of_device else None
            if last is not None and last.end_layer == part.layer:
                longer = replace(last, end_layer=run.end_layer)
                if longer == replace(run, first_layer=last.first_layer):
                    runs[-1] = longer
                    continue
            runs.append(run)
    return tuple(runs)


def only_replicas(plan: Plan, parts: Parts) -> list[int]:
    """Return the layers of which the plan's devices have some part only as a replica, because its owner is
    lost.
    """
    own = [[part for part in parts.get(device, ()) if not part.replica] for device in plan.devices]
    return incomplete(own, plan.pipelines[0].stages[-1].end_layer)
