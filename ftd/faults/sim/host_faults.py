"""Faults of whole hosts: they go for good and are replaced under a new name (as pods and rented machines are),
or they lose power for a while.

Nobody closes the connections of a host without power, so the broker publishes its last will when the
keep-alive expires. By then the host may be back under a new incarnation, or may have been removed.
"""

from ftd.faults.sim.broker_checks import STATE_S
from ftd.faults.sim.network import KEEP_ALIVE_S
from ftd.faults.sim.simulation import Simulation


def replace_host(sim: Simulation, which: float, after_s: float) -> None:
    """Remove a host for good; another one comes ``after_s``."""
    there = [node for node in sim.nodes.values() if node.removed_at is None]
    if sim.healed or not there:
        return
    node = there[int(which * len(there))]
    sim.log(f"{node.name} is gone for good")
    node.crash(host=True)
    node.removed_at = sim.world.now
    sim.world.call_later(after_s, sim.add_node)


def lose_power(sim: Simulation, which: float, back_s: float) -> None:
    live = [
        node for node in sim.nodes.values() if node.up and sim.network.connection_of(node.name) is not None
    ]
    if sim.healed or not live:
        return
    node = live[int(which * len(live))]
    sim.log(f"{node.name} loses power for {back_s:.2f} s")
    connection = sim.network.forget_connection(node.name)  # Nobody notices more than that.
    assert connection is not None, "it is connected"
    sim.world.call_later(KEEP_ALIVE_S, sim.network.publish_will, connection, sim.network.lost_state_at)
    sim.world.call_later(KEEP_ALIVE_S + STATE_S, sim.broker_checks.check_state, node)
    node.crash(host=True)
    sim.world.call_later(back_s, sim.start_if_down, node)
