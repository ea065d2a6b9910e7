"""ZeRO-1 as the protocol sees it: which parts of layers a plan gives to whom, and who has which.

Part i of each layer is the i-th pipeline's owner's, who with ``aor`` keeps a replica of the next one's, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.changes.parts import incomplete
from planner.values import Device, Plan, StatePart
from statemachine.values import HeldPart

Parts = Mapping[Device, Iterable[StatePart]]


def owned_parts(plan: Plan, device: Device) -> frozenset[tuple[int, int, bool]]:
    """(part, parts, replica) of what a device of the plan keeps of its layers, if there are replicas."""
    parts = len(plan.pipelines)
    number = next(
        number
        for number, pipeline in enumerate(plan.pipelines)
        if any(device in stage.devices for stage in pipeline.stages)
    )
    return frozenset({(number, parts, False), ((number + 1) % parts, parts, True)})


def held_parts(plan: Plan, holdings: Mapping[Device, frozenset[int]], parts: Parts) -> tuple[HeldPart, ...]:
    """What the devices of ``plan`` have, in runs of layers, in the order of the ranks.

    :param holdings: the layers whose parameters and buffers each has whole.
    """
    runs: list[HeldPart] = []
    for device in plan.devices:
        whole, of_device = holdings.get(device, frozenset()), len(runs)
        for part in sorted(parts.get(device, ()), key=lambda p: (p.replica, p.parts, p.part, p.layer)):
            run = HeldPart(
                device=device,
                first_layer=part.layer,
                end_layer=part.layer + 1,
                part=part.part,
                parts=part.parts,
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
    """Layers of which the plan's devices have some part as a replica only: its owner is lost."""
    own = [[part for part in parts.get(device, ()) if not part.replica] for device in plan.devices]
    return incomplete(own, plan.pipelines[0].stages[-1].end_layer)
