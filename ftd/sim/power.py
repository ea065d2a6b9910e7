"""Hosts that lose power: nobody closes their connections, so the broker publishes the last will when the
keep-alive is over. By then the host may be back, under a new incarnation, or be forgotten.

Drawn from a source of its own, so that whatever else happens in a seed stays as it is.
"""

from random import Random
from typing import TYPE_CHECKING

from ftd.sim.network import KEEP_ALIVE_S

if TYPE_CHECKING:
    from ftd.sim.node import SimNode
    from ftd.sim.run import Simulation


def draw(sim: "Simulation", until_s: float) -> None:
    """In some seeds, or in all that lean to it."""
    rng = Random(f"{sim.world.seed} power")
    wanted = rng.random() < 0.2 if sim.leaning.late_wills is None else sim.leaning.late_wills
    if wanted:
        for _ in range(rng.randint(1, 3)):
            sim.world.at(rng.uniform(0.5, until_s), _strike, sim, rng.random(), rng.uniform(0.1, 8.0))


def _strike(sim: "Simulation", which: float, back_s: float) -> None:
    live = [node for node in sim.nodes.values() if node.up and sim.network.sessions[node.name].open]
    if sim.healed or not live:
        return
    node = live[int(which * len(live))]
    sim.log(f"{node.name} loses power for {back_s:.2f} s")
    sim.network.sessions[node.name].open = False  # As far as anybody will hear of it.
    sim.world.at(KEEP_ALIVE_S, _last_will, sim, node, node.incarnation, sim.network.forgot_at)
    node.crash(host=True)
    sim.world.at(back_s, sim.revive, node)


def _last_will(sim: "Simulation", node: "SimNode", incarnation: int, forgot_at: float) -> None:
    """It goes over what the node said meanwhile, which says it again."""
    network = sim.network
    if network.up and network.forgot_at == forgot_at:
        network.tell_state(node.name, True, incarnation, False)
        if node.up and network.sessions[node.name].open:
            network.retain(node.name, False, node.incarnation)
