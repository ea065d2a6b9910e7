"""A simulated host as its processes see it: its memory, its links to the other hosts, its agent, how fast it is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ftd.faults.sim.arena import SimArena, lacking, of_group
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.network import SimNetwork
from ftd.faults.sim.oracle import Oracle
from statemachine.agent.events import SnapshotCopiesChanged
from statemachine.agent.machine import AgentEvent, AgentMachine
from statemachine.messages.values import HeldSnapshot, Restore


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """How steps go in this world: the moments between two trainers are where protocols break."""

    step_s: float
    imbalance: float
    """A rank computes up to this part of a step longer than another, which waits at the VOTE."""
    commit_spread_s: float
    """From the VOTE's end to a rank's commit, at most."""
    full: float = 0.0
    """Probability that a snapshot has no room."""


class SimHost(ABC):
    """What trainers and the parts of a daemon use of the host that they run on."""

    def __init__(
        self,
        truth: Oracle,
        network: SimNetwork,
        place: SimCheckpointStore,
        hosts: Mapping[str, "SimHost"],
        name: str,
        pace: StepTiming,
    ) -> None:
        """:param hosts: all hosts of the world by name, this one among them."""
        self.oracle, self.world, self.versions = truth, truth.world, truth.versions
        self.network, self.place, self.hosts = network, place, hosts
        self.name, self.pace = name, pace
        self.up = False
        """The daemon runs."""
        self.frozen = False
        """The daemon is stopped."""
        self.data_cut = False
        """The other hosts are out of reach."""
        self.slowness = 1.0
        """Its trainers take so many times as long to compute."""
        self.life = 0
        """Counts daemon processes and fences: what was scheduled for an earlier one does not count."""
        self.arena = SimArena(node=name, truth=truth)
        self.agent = AgentMachine(name, self.world.timing)

    @abstractmethod
    def feed(self, event: AgentEvent) -> None:
        """Let the agent take an event, and carry out what it decides."""

    def tell_copies(self) -> None:
        """Report to the agent what is kept for others."""
        self.feed(SnapshotCopiesChanged(at=self.world.now, cause="arena", snapshots=self.arena.copy_keys()))

    def reaches(self, other: "SimHost") -> bool:
        """Over what trainers and shards go."""
        if self.data_cut or other.data_cut:
            return False
        return not self.network.apart or frozenset((self.name, other.name)) not in self.network.apart

    def serves(self, reader: "SimHost") -> bool:
        """Its shards and copies can be had there."""
        return self.up and not self.frozen and (self is reader or self.reaches(reader))

    def restored(self, restore: Restore, layers: set[int]) -> tuple[dict[int, int], tuple[str, ...]]:
        """Return the version of each of these layers, as put together here now; or the nodes whose shards cannot be
        had."""
        key = HeldSnapshot(job_id=restore.job_id, step=restore.step, generation=restore.generation)
        found: dict[int, int] = {}
        for group in restore.groups:
            wanted = layers & set(range(group.first_layer, group.end_layer))
            if not wanted:
                continue
            able = {name for name in restore.sources if self.hosts[name].serves(self)}
            there = {name for name in able if self.hosts[name].arena.sound(key)}
            copy = (
                self.hosts[group.replica_peer].arena.copy(key, group.owners[0])
                if group.replica_peer in able
                else None
            )
            if lacking(group, there, {group.owners[0]} if copy is not None else set()):
                asked = {*group.owners, group.replica_peer} & set(restore.sources)
                return {}, tuple(sorted(asked - there if copy is None else asked))
            held = [self.hosts[name].arena.layers(key) for name in group.owners if name in there]
            held += [copy.layers] if copy is not None else []
            shards = [of_group(layers, group) for layers in held]
            self.oracle.restores(restore, group, shards)
            found.update({layer: shards[0][layer] for layer in wanted})
        return found, ()
