"""The job's code is wrong; and a job may be said to be wrong only where it is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftd.faults.sim.invariants import Invariants
    from ftd.faults.sim.run import Simulation

WORDS = "ValueError: the code is wrong"


def raise_everywhere(sim: "Simulation") -> None:
    """In the step under way, wherever it is computed; those who are stopped before do not come to it."""
    sim.invariants.wrong_code = True
    for node in sim.nodes.values():
        for device in list(node.trainers):
            if sim.world.chance(0.8):
                node.fail_trainer(device, "raised", WORDS)


def explains(truth: "Invariants", reason: str) -> bool:
    """The job is given up as its code raised, and not for want of state."""
    if not reason.startswith("the job's code raised "):
        return False
    if not truth.wrong_code or WORDS not in reason:
        truth.broken(f"a node's own failure was taken for the job's: {reason}")
    return True
