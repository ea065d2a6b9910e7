"""What the planner will likely be asked once everybody reported, so that it can begin while they do.

Where nodes are lost the others stop in the same step, each with the layers that the plan gave it. If somebody
reports anything else, the plan is made when that is known, as if nothing had been foreseen.
"""

from planner.values import Device, Situation
from statemachine.cluster.horizon import horizon_s
from statemachine.cluster.rules import owned_layers
from statemachine.cluster.state import Cluster
from statemachine.effects import ForeseePlan


def foresee(c: Cluster) -> None:
    """Again whenever the nodes that are waited for have changed."""
    attempt, resumption = c.attempt, c.resumption
    if attempt is None or attempt.mode != "abort" or attempt.foreseen == len(attempt.expected):
        return
    if resumption is None or not c.templates_ready or c.job is None or resumption.held_parts:
        return  # The parts that somebody holds are not the plan's alone.
    attempt.foreseen = len(attempt.expected)
    nodes = [c.nodes[name] for name in sorted(attempt.expected)]
    devices = {node.name: node.facts.devices for node in nodes if node.draining is None}
    if devices:
        c.out.append(
            ForeseePlan(
                cause=c.cause,
                devices=devices,
                previous=resumption.plan,
                speeds=c.speeds,
                horizon_s=horizon_s(c, len(devices)),
            )
        )


def expected(effect: ForeseePlan) -> Situation:
    """What ``ComputePlan`` will say if every node reports the layers that the plan gave it."""
    owned = owned_layers(effect.previous)
    devices = (
        Device(node=node, index=index) for node, count in effect.devices.items() for index in range(count)
    )
    return Situation(
        nodes=tuple(effect.devices),
        holdings={device: owned.get(device, frozenset()) for device in devices},
        previous=effect.previous,
        speeds=effect.speeds,
        horizon_s=effect.horizon_s,
    )
