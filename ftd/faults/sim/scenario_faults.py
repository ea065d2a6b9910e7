"""The faults of a chaos scenario, injected into a simulated cluster."""

from dataclasses import replace
from typing import assert_never

from ftd.errors import PeerError
from ftd.faults.chaos.values import Fault
from ftd.faults.sim.cluster import SimCluster
from ftd.faults.sim.node import SimNode
from ftd.node.message_faults import LinkFaults

FOR_EVER_S = 1e6
DEFAULT_FACTOR = 3.0


def inject_into_service(cluster: SimCluster, fault: Fault, part: str) -> None:
    """Inject a fault into the leading coordinator or the broker."""
    for_s = fault.for_s or FOR_EVER_S
    match part, fault.do:
        case "coordinator", "kill":
            leader = cluster.coordinator
            leader.crash()
            cluster.world.call_later(fault.restart_after_s, leader.restart)
        case "coordinator", _:
            cluster.coordinator.freeze(for_s)
        case "broker", "kill":
            cluster.network.stop_broker(fault.restart_after_s)
        case _:  # The broker is frozen: no message arrives anywhere.
            for name in (*(one.name for one in cluster.coordinators), *cluster.nodes):
                cluster.network.cut(name, for_s)


def inject_into_node(cluster: SimCluster, fault: Fault, name: str) -> None:
    """Inject a fault into a node.

    :raises PeerError: the node is not up, or the fault is not possible at the moment.
    """
    node = cluster.nodes.get(name)
    if node is None or not node.up:
        raise PeerError(f"{name} is not up")
    clock, for_s = cluster.world, fault.duration_s or FOR_EVER_S
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
                clock.call_later(for_s, trainer.wake)
        case "slow":
            node.slowness = fault.factor or DEFAULT_FACTOR
            if fault.for_s is not None:
                clock.call_later(fault.for_s, node.restore_speed)
        case "bad_device":
            devices = range(node.devices) if fault.device is None else (fault.device,)
            node.plant_bad_device(fault.how, devices, for_s)
        case "disconnect":
            node.disconnect(for_s)
        case "cut":
            _cut(cluster, node, for_s)
        case "fill_memory":
            node.step_timing = replace(node.step_timing, no_room_probability=1.0)
            clock.call_later(for_s, _free_memory, node)
        case "fill_disk":
            cluster.checkpoint_store.write_failure_probability = 1.0
            clock.call_later(for_s, _free_disk, cluster)
        case "lossy":
            faults = LinkFaults(drop=fault.drop, duplicate=fault.duplicate, late_s=fault.late_s)
            node.lose_messages(faults, for_s)
        case "flip":
            _flip(cluster, fault, node)
        case "corrupt":
            if not any(node.trainers[device].flip_bit() for device in _devices(fault, node)):
                raise PeerError(f"{node.name} trains no layer of which another node has a copy now")
        case "start":
            raise PeerError(f"{node.name} is running already")
        case _:
            assert_never(fault.do)


def _flip(cluster: SimCluster, fault: Fault, node: SimNode) -> None:
    """:raises PeerError: the node holds no part of a complete snapshot."""
    newest = cluster.invariants.newest
    parts = {} if newest is None else node.arena.parts(cluster.invariants.key_of(newest))
    shards = [shard for device, shard in parts.items() if fault.device in (None, device)]
    if not shards:
        raise PeerError(f"{node.name} holds no shard of a snapshot that is complete everywhere now")
    for shard in shards:
        shard.corrupt = True


def _devices(fault: Fault, node: SimNode) -> list[int]:
    """:raises PeerError: there is no such trainer now."""
    found = [device for device in node.trainers if fault.device in (None, device)]
    if not found:
        raise PeerError(f"{node.name} runs no such trainer now")
    return found


def _cut(cluster: SimCluster, node: SimNode, for_s: float) -> None:
    """Cut a node off from the broker and from the other hosts, whose connections to it break."""
    cluster.network.cut(node.name, for_s)
    node.data_cut = True
    for trainer in list(node.trainers.values()):
        if trainer.group is not None:
            trainer.group.break_connection()
    cluster.world.call_later(for_s, node.reconnect)


def _free_disk(cluster: SimCluster) -> None:
    cluster.checkpoint_store.write_failure_probability = 0.0


def _free_memory(node: SimNode) -> None:
    node.step_timing = replace(node.step_timing, no_room_probability=0.0)
