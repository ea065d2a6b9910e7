"""A simulated host as its processes see it: its memory, its links to other hosts, its agent, and its speed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ftd.faults.sim.arena import SimArena, is_unrecoverable, layers_of_group
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.network import SimNetwork
from ftd.faults.sim.oracle import Oracle
from statemachine.agent.events import SnapshotCopiesChanged
from statemachine.agent.machine import AgentEvent, AgentMachine
from statemachine.messages.values import HeldSnapshot, Restore


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """The timing of steps in this world. Protocols break in the moments between two trainers."""

    step_s: float
    imbalance: float
    """The largest fraction by which a rank computes longer than another one, which waits at the VOTE."""
    commit_spread_s: float
    """The longest time from the end of the VOTE to a rank's commit."""
    no_room_probability: float = 0.0
    """The probability that there is no room for a snapshot."""


class SimHost(ABC):
    """Interface of the host for its trainers and for the parts of its daemon."""

    def __init__(
        self,
        oracle: Oracle,
        network: SimNetwork,
        checkpoint_store: SimCheckpointStore,
        hosts: Mapping[str, "SimHost"],
        name: str,
        step_timing: StepTiming,
    ) -> None:
        """:param hosts: all hosts of the world by name, including this one."""
        self.oracle, self.world, self.versions = oracle, oracle.world, oracle.versions
        self.network, self.checkpoint_store, self.hosts = network, checkpoint_store, hosts
        self.name, self.step_timing = name, step_timing
        self.up = False
        """Whether the daemon is running."""
        self.frozen = False
        """Whether the daemon is stopped."""
        self.data_cut = False
        """Whether the other hosts are out of reach."""
        self.slowness = 1.0
        """The factor by which its trainers compute more slowly."""
        self.life = 0
        """Number of daemon processes and fences so far. Actions that were scheduled in an earlier life are
        ignored.
        """
        self.arena = SimArena(node=name, oracle=oracle)
        self.agent = AgentMachine(name, self.world.timing)

    @abstractmethod
    def feed(self, event: AgentEvent) -> None:
        """Feed an event to the agent, and carry out its effects."""

    def report_copies(self) -> None:
        """Report to the agent which snapshot copies are held for others."""
        self.feed(SnapshotCopiesChanged(at=self.world.now, cause="arena", snapshots=self.arena.copy_keys()))

    def reaches(self, other: "SimHost") -> bool:
        """Return whether trainers and shards can connect to the other host."""
        if self.data_cut or other.data_cut:
            return False
        return (
            not self.network.partitioned_pairs
            or frozenset((self.name, other.name)) not in self.network.partitioned_pairs
        )

    def serves(self, reader: "SimHost") -> bool:
        """Return whether another host can read its shards and copies."""
        return self.up and not self.frozen and (self is reader or self.reaches(reader))

    def restore_layers(self, restore: Restore, layers: set[int]) -> tuple[dict[int, int], tuple[str, ...]]:
        """Return the version of each of these layers as restored here now, or the nodes whose shards cannot be
        read.
        """
        key = HeldSnapshot(job_id=restore.job_id, step=restore.step, generation=restore.generation)
        found: dict[int, int] = {}
        for group in restore.groups:
            needed = layers & set(range(group.first_layer, group.end_layer))
            if not needed:
                continue
            able = {name for name in restore.sources if self.hosts[name].serves(self)}
            there = {name for name in able if self.hosts[name].arena.is_intact(key)}
            copy = (
                self.hosts[group.replica_peer].arena.copy(key, group.owners[0])
                if group.replica_peer in able
                else None
            )
            if is_unrecoverable(group, there, {group.owners[0]} if copy is not None else set()):
                asked = {*group.owners, group.replica_peer} & set(restore.sources)
                return {}, tuple(sorted(asked - there if copy is None else asked))
            held = [self.hosts[name].arena.layers(key) for name in group.owners if name in there]
            held += [copy.layers] if copy is not None else []
            shards = [layers_of_group(layers, group) for layers in held]
            self.oracle.check_restored(restore, group, shards)
            found.update({layer: shards[0][layer] for layer in needed})
        return found, ()
