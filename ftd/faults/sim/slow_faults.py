"""Faults that make something slow, but neither dead nor away for good."""

from ftd.faults.sim.faults import on_some_node
from ftd.faults.sim.node import SimNode
from ftd.faults.sim.simulation import Simulation


@on_some_node
def slow_node(sim: Simulation, node: SimNode) -> None:
    """Make a node compute slowly, for a while or until the healing."""
    node.slowness = sim.world.between(1.2, 6.0)
    sim.log(f"slow {node.name} by {node.slowness:.1f}")
    if sim.world.chance(0.6):
        sim.world.call_later(sim.world.between(3.0, 15.0), node.restore_speed)


@on_some_node
def pause_trainer(sim: Simulation, node: SimNode) -> None:
    """Stop a trainer and continue it later: before anybody notices, or after it was declared lost."""
    if node.trainers:
        for_s = sim.world.between(0.1, 6.0)
        trainer = sim.world.rng.choice(list(node.trainers.values()))
        sim.log(f"trainer {node.name}/{trainer.device} is stopped for {for_s:.2f} s")
        _pause(sim, node, [trainer.device], for_s)


@on_some_node
def pause_host(sim: Simulation, node: SimNode) -> None:
    """Stop all processes of a host, as the migration of a virtual machine does."""
    for_s = sim.world.between(0.1, 8.0)
    sim.log(f"{node.name} stands still for {for_s:.2f} s")
    node.freeze(for_s)
    _pause(sim, node, list(node.trainers), for_s)


def _pause(sim: Simulation, node: SimNode, devices: list[int], for_s: float) -> None:
    for trainer in [node.trainers[device] for device in devices]:
        if not trainer.frozen and not trainer.asleep:
            trainer.frozen = True
            sim.world.call_later(for_s, trainer.wake)


@on_some_node
def stutter_daemon(sim: Simulation, node: SimNode) -> None:
    """Let a daemon run only a little at a time."""
    sim.log(f"the daemon of {node.name} stutters")
    for _ in range(sim.world.rng.randrange(2, 10)):
        sim.world.call_later(sim.world.between(0.0, 8.0), node.freeze, sim.world.between(0.1, 1.0))


def stutter_leader(sim: Simulation) -> None:
    """Stop the leader repeatedly, for about as long as it takes others to consider it dead."""
    leader = sim.coordinator
    sim.log(f"{leader.name} stutters")
    for _ in range(sim.world.rng.randrange(2, 10)):
        sim.world.call_later(sim.world.between(0.0, 8.0), leader.freeze, sim.world.between(0.1, 2.5))


def slow_planning(sim: Simulation) -> None:
    """Make plans slow, as if nothing were precomputed or the host were busy."""
    max_planning_s = sim.world.between(0.5, 6.0)
    sim.log(f"plans take up to {max_planning_s:.1f} s")
    for coordinator in sim.coordinators:
        coordinator.max_planning_s = max_planning_s
    sim.world.call_later(sim.world.between(3.0, 15.0), _plan_quickly, sim)


def _plan_quickly(sim: Simulation) -> None:
    for coordinator in sim.coordinators:
        coordinator.max_planning_s = 0.0


@on_some_node
def slow_transfers(sim: Simulation, node: SimNode) -> None:
    """Make a node read and send snapshots slowly, up to beyond the timeouts of those who wait for it."""
    node.max_read_s, node.max_send_s = sim.world.between(0.5, 15.0), sim.world.between(0.5, 8.0)
    sim.log(f"{node.name} reads up to {node.max_read_s:.1f} s, sends {node.max_send_s:.1f} s")


@on_some_node
def restart_slowly(sim: Simulation, node: SimNode) -> None:
    """Kill a daemon and make the next one take long to find what its memory holds."""
    node.max_scan_s = sim.world.between(0.5, 10.0)
    sim.log(f"restart {node.name}, which takes up to {node.max_scan_s:.1f} s to look through its memory")
    node.crash()
    sim.world.call_later(sim.world.between(0.001, 0.5), sim.start_if_down, node)
