"""Hosts that go: for good, with another one in their place under a new name (pods, machines that are rented);
or for as long as they have no power.

Nobody closes the connections of a host without power, so the broker publishes its last will when the
keep-alive is over. By then it may be back, under a new incarnation, or be forgotten.
"""

from ftd.faults.sim.network import KEEP_ALIVE_S
from ftd.faults.sim.node import SimNode
from ftd.faults.sim.simulation import Simulation


def replace_host(sim: Simulation, which: float, after_s: float) -> None:
    """It is gone for good; ``after_s`` another one comes."""
    there = [node for node in sim.nodes.values() if node.gone_at is None]
    if sim.healed or not there:
        return
    node = there[int(which * len(there))]
    sim.log(f"{node.name} is gone for good")
    node.crash(host=True)
    node.gone_at = sim.world.now
    sim.world.call_later(after_s, sim.add_node)


def lose_power(sim: Simulation, which: float, back_s: float) -> None:
    live = [node for node in sim.nodes.values() if node.up and sim.network.is_connected(node.name)]
    if sim.healed or not live:
        return
    node = live[int(which * len(live))]
    sim.log(f"{node.name} loses power for {back_s:.2f} s")
    sim.network.forget_connection(node.name)  # As far as anybody will hear of it.
    sim.world.call_later(KEEP_ALIVE_S, _last_will, sim, node, node.incarnation, sim.network.forgot_at)
    node.crash(host=True)
    sim.world.call_later(back_s, sim.revive, node)


def _last_will(sim: Simulation, node: SimNode, incarnation: int, forgot_at: float) -> None:
    """It goes over what the node said meanwhile, which says it again."""
    network = sim.network
    if network.up and network.forgot_at == forgot_at:
        network.publish_node_state(node.name, True, incarnation, False)
        if node.up and network.is_connected(node.name):
            network.retain(node.name, False, node.incarnation)
