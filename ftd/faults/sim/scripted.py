"""The faults of a scenario, done to the simulator's world; and which of them it cannot do, and why."""

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from ftd.errors import PeerError
from ftd.faults.chaos.targets import nodes_struck
from ftd.faults.chaos.values import Central, Fault
from ftd.faults.sim.network import Line
from statemachine.timing import Timing

if TYPE_CHECKING:
    from ftd.faults.sim.node import SimNode
    from ftd.faults.sim.scenario import ScenarioWorld

FOR_EVER_S = 1e6
DEFAULT_FACTOR = 3.0


def why_unsupported(fault: Fault, timing: Timing, step_s: float, devices: int) -> str:
    """Why the simulator cannot do this, in words; empty: it can."""
    hung_s = 2 * max(timing.hang_floor_s, timing.hang_steps * step_s)
    short = fault.for_s is not None and fault.for_s < max(hung_s, timing.silence_s + 1.0)
    match fault.do:
        case "hang" if short and not isinstance(fault.target, Central):
            return "simulated trainers that sleep do not wake up again: it must last until they count as lost"
        case "slow" if fault.device is not None and devices > 1:
            return "a simulated node is slow with all of its trainers"
        case _:
            return ""


def strike(world: "ScenarioWorld", fault: Fault) -> tuple[str, ...]:
    """Do it now; the nodes that it strikes.

    :raises PeerError: nobody has the role that it strikes, or it cannot be done as things are.
    """
    if isinstance(fault.target, Central):
        _strike_central(world, fault, fault.target.part)
        return ()
    names = nodes_struck(fault, world.layout, world.scenario.seed)
    for name in names:
        if fault.do == "start":
            world.start(name)
            continue
        node = world.nodes.get(name)
        if node is None or not node.up:
            raise PeerError(f"{name} is not up")
        _strike_node(world, fault, node)
    return names


def _strike_central(world: "ScenarioWorld", fault: Fault, part: str) -> None:
    for_s = fault.for_s or FOR_EVER_S
    match part, fault.do:
        case "coordinator", "kill":
            leader = world.leader
            leader.crash()
            world.world.at(fault.restart_after_s, leader.restart)
        case "coordinator", _:
            world.leader.freeze(for_s)
        case "broker", "kill":
            world.network.stop_broker(fault.restart_after_s)
        case _:  # A broker that stands still: nobody hears anybody.
            for name in (*world.setting.coordinators, *world.nodes):
                world.network.cut(name, for_s)


def _strike_node(world: "ScenarioWorld", fault: Fault, node: "SimNode") -> None:
    clock, for_s = world.world, fault.lasts_s or FOR_EVER_S
    match fault.do:
        case "kill" if fault.process == "node":
            node.crash()
        case "kill" | "raise":
            for device in _devices(fault, node):
                node.fail_trainer(device, "raised" if fault.do == "raise" else "exited")
        case "term":
            node.terminate()
        case "stop" | "hang":
            if fault.do == "stop" and fault.process == "node":
                node.freeze(for_s)
            for device in _devices(fault, node):
                trainer = node.trainers[device]
                trainer.frozen, trainer.asleep = fault.do == "stop", fault.do == "hang"
                clock.at(for_s, trainer.wake)
        case "slow":
            node.slowness = fault.factor or DEFAULT_FACTOR
            if fault.for_s is not None:
                clock.at(fault.for_s, _quicken, node)
        case "disconnect":
            world.network.cut(node.name, for_s)
            world.network.drop(node.name)
        case "cut":
            _cut(world, node, for_s)
        case "fill_memory":
            node.pace = replace(node.pace, full=1.0)
            clock.at(for_s, _empty, node)
        case "fill_disk":
            world.place.full = 1.0
            clock.at(for_s, world.empty_disk)
        case "lossy":
            line = Line(drop=fault.drop, duplicate=fault.duplicate, late_s=fault.late_s)
            world.network.lines[node.name] = line
            clock.at(for_s, _mend, world, node)
        case "flip":
            _flip(world, fault, node)
        case "start":
            raise PeerError(f"{node.name} is running already")
        case _:
            assert_never(fault.do)


def _flip(world: "ScenarioWorld", fault: Fault, node: "SimNode") -> None:
    """:raises PeerError: it keeps nothing of a complete snapshot."""
    newest = world.invariants.newest
    parts = {} if newest is None else node.arena.parts(world.invariants.key_of(newest))
    shards = [shard for device, shard in parts.items() if fault.device in (None, device)]
    if not shards:
        raise PeerError(f"{node.name} keeps no part of a snapshot that is complete everywhere now")
    for shard in shards:
        shard.damaged = True


def _devices(fault: Fault, node: "SimNode") -> list[int]:
    """:raises PeerError: there is no such trainer now."""
    found = [device for device in node.trainers if fault.device in (None, device)]
    if not found:
        raise PeerError(f"{node.name} runs no such trainer now")
    return found


def _cut(world: "ScenarioWorld", node: "SimNode", for_s: float) -> None:
    """From the broker and from the other hosts, whose connections to it break."""
    world.network.cut(node.name, for_s)
    node.data_cut = True
    for trainer in list(node.trainers.values()):
        if trainer.group is not None:
            trainer.group.break_connection()
    world.world.at(for_s, _reconnect, node)


def _mend(world: "ScenarioWorld", node: "SimNode") -> None:
    world.network.lines.pop(node.name, None)


def _reconnect(node: "SimNode") -> None:
    node.data_cut = False


def _quicken(node: "SimNode") -> None:
    node.slowness = 1.0


def _empty(node: "SimNode") -> None:
    node.pace = replace(node.pace, full=0.0)
