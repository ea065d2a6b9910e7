"""A simulated host as its processes see it: its memory, its links to other hosts, its daemon, and its speed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from ftd.faults.sim.arena import SimArena, is_unrecoverable, layers_of_group
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.network import SimNetwork
from ftd.faults.sim.oracle import Oracle
from ftd.faults.sim.process import ProcessHost, ProcessLoop
from ftd.node.ports import TrainerProcess
from statemachine.messages.cluster import Resume
from statemachine.messages.trainer import Report
from statemachine.messages.values import HeldSnapshot, PlantedFault, Restore


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayers:
    """Layers that were staged for trainers."""

    layers: dict[int, int]
    """The state version of each layer."""
    corrupt: frozenset[int]
    """Layers with borrowed bytes that have changed, which trainers notice."""


class SimHost(ProcessHost, ABC):
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
        self.loop = ProcessLoop(self.world)
        self.data_cut = False
        """Whether the other hosts are out of reach."""
        self.slowness = 1.0
        """The factor by which its trainers compute more slowly."""
        self.device_fault: PlantedFault = ""
        """The fault of its devices, which their tests find."""
        self.health_rng = Random(f"health {self.world.seed} {name}")
        """Random numbers for the tests of its devices and links. A generator of their own: see ``drawing``."""
        self.arena = SimArena(node=name, oracle=oracle)
        self.resumes: dict[int, Resume] = {}
        """The Resume of each generation that its daemon received, by which trainers know the whole plan."""
        self.staged: dict[str, StagedLayers] = {}
        """Staged layers by their directory."""
        self.failing_builds = 0
        """Number of the next builds that fail."""
        self.max_scan_s = self.max_read_s = self.max_send_s = 0.0
        """The longest extra time for the scan of its memory, for reading a snapshot, and for sending a copy."""

    @property
    @abstractmethod
    def copies_job(self) -> str | None:
        """The job of whose snapshots the daemon accepts copies."""

    @abstractmethod
    def on_copies_changed(self) -> None:
        """Note that other copies than before are held, once the daemon runs."""

    @abstractmethod
    def deliver(self, trainer: TrainerProcess, report: Report) -> None:
        """Deliver a frame of a trainer to the daemon."""

    def reconnect(self) -> None:
        """End the cut from the other hosts."""
        self.data_cut = False

    def restore_speed(self) -> None:
        """Let its trainers compute at normal speed again."""
        self.slowness = 1.0

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

    def restore_layers(
        self, restore: Restore, layers: set[int], *, borrows: bool = False
    ) -> tuple[dict[int, int], tuple[str, ...]]:
        """Return the version of each of these layers as restored here now, or the nodes whose shards cannot be
        read.

        :param borrows: read this host's own shards without verifying them.
        """
        key = HeldSnapshot(job_id=restore.job_id, step=restore.step, generation=restore.generation)
        found: dict[int, int] = {}
        for group in restore.groups:
            needed = layers & set(range(group.first_layer, group.end_layer))
            if not needed:
                continue
            able = {name for name in restore.sources if self.hosts[name].serves(self)}
            there = {name for name in able if self.hosts[name].arena.is_intact(key)}
            if borrows and self.name in able and self.arena.holds(key):
                there.add(self.name)
            copy = (
                self.hosts[group.replica_peer].arena.copy(key, group.owners[0])
                if group.replica_peer in able
                else None
            )
            if is_unrecoverable(group, there, copied=copy is not None):
                asked = {*group.owners, group.replica_peer} & set(restore.sources)
                return {}, tuple(sorted(asked - there if copy is None else asked))
            held = [self.hosts[name].arena.layers(key) for name in group.owners if name in there]
            held += [copy.layers] if copy is not None else []
            shards = [layers_of_group(layers, group) for layers in held]
            self.oracle.check_restored(restore, group, shards)
            found.update({layer: shards[0][layer] for layer in needed})
        return found, ()
