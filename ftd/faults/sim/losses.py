"""State may be given up only when it is really lost."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ftd.faults.sim import arena
from ftd.faults.sim.trainers import SimTrainer
from planner.changes.parts import incomplete
from statemachine.cluster.machine import ClusterMachine

if TYPE_CHECKING:
    from ftd.faults.sim.invariants import Invariants


class Written:
    """What a journal that is written says."""

    def __init__(self, machine: ClusterMachine) -> None:
        self.job_id, self.snapshot, self.checkpoint = machine.job_id, machine.snapshot, machine.checkpoint
        self.job = machine.job
        self.writing, self.lineage = machine.writing, machine.lineage
        self.committed_step, self.members = machine.committed_step, machine.members
        self.generation = machine.generation


def lacking(
    truth: "Invariants", trainers: Iterable[SimTrainer], step: int, ready: Iterable[SimTrainer] = ()
) -> set[int]:
    """Layers of which these trainers do not hold everything at ``step``, nor those that are ``ready`` for it
    once they have applied their gradients."""
    at = truth.versions.step
    if truth.policy.zero1:
        parts = [[part for part, v in trainer.parts.items() if at[v] == step] for trainer in trainers]
        parts += [[part for part in trainer.parts if part in trainer.gradients[2]] for trainer in ready]
        return set(incomplete(parts, truth.layers))
    held = {layer for trainer in trainers for layer, v in trainer.layers.items() if at[v] == step}
    return set(range(truth.layers)).difference(held, *(trainer.gradients[1] for trainer in ready))


def rolls_back(truth: "Invariants", machine: Written) -> None:
    """Nobody goes back while those who take part hold all layers of their newest step; nor, with replicas
    of all parts, when a group that trained lost one node."""
    live = [
        trainer
        for name in machine.members
        for trainer in truth.nodes[name].trainers.values()
        if trainer.able and trainer.generation == machine.generation and trainer.lineage == truth.lineage
    ]
    newest = max([truth.known, *(trainer.committed for trainer in live)])
    ready = [t for t in live if t.ready == newest and t.gradients[0] == truth.newest_resume]
    if not lacking(truth, live, newest, ready):
        truth.broken(f"rolled back, and live trainers hold all layers of step {newest}")
    group = truth.trained
    if group is None or not group.sharded or "aor" not in group.resume.protection:
        return
    gone = {
        trainer.node.name
        for trainer in group.trained_by.values()
        if trainer.node.name not in machine.members or not trainer.able
    }
    if len(group.resume.plan.pipelines) > 1 and len(gone) < 2:
        truth.broken(f"rolled back, and of a group with replicas only {sorted(gone)} are lost")


def forgotten(truth: "Invariants") -> bool:
    """Is no trainer left that committed the newest step that was told?"""
    trainers = [trainer for node in truth.nodes.values() for trainer in node.trainers.values()]
    return not any(trainer.alive and trainer.committed >= truth.newest_told for trainer in trainers)


def gives_up(truth: "Invariants") -> None:
    """State may be given up only when no trainer that counts holds some layer of the newest step.

    Those of a node one of whose trainers is dead or hangs do not count, since its agent ends them all;
    nor do those that missed the last Resume: the cluster went on without them, and whether they went
    another way behind their partition nobody can know.
    """
    counting = [
        trainer
        for node in truth.nodes.values()
        if all(trainer.able for trainer in node.trainers.values())
        for trainer in node.trainers.values()
        if trainer.generation >= truth.newest_resume and trainer.lineage == truth.lineage
    ]
    if not lacking(truth, counting, truth.known, [t for t in counting if t.ready == truth.known]):
        truth.broken("the job was given up while live trainers hold all of its state")
    if truth.newest is not None:
        key = truth.key_of(truth.newest)
        up = {name: node for name, node in truth.nodes.items() if node.up}
        there = {name for name, node in up.items() if node.arena.sound(key)}
        copied = {
            owner
            for owner, buddy in truth.newest.buddies.items()
            if buddy in up and up[buddy].arena.copy(key, owner) is not None
        }
        if not any(arena.lacking(group, there, copied) for group in truth.newest.groups):
            truth.broken(
                f"the job was given up while {sorted(there)}, and buddies of {sorted(copied)}, hold the "
                f"snapshot of {key.step}"
            )
    sound = [step for step, kept in truth.place.kept.items() if not kept.damaged]
    if sound:
        truth.broken(f"the job was given up while there are sound checkpoints of steps {sound}")
