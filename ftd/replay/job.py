"""The job that is replayed: a model's profile, the planner's policy, and what is published about it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ftd.errors import ConfigurationError
from planner.errors import BatchError, InfeasibleError
from planner.planner import Planner
from planner.values import ModelProfile, Policy


class JobError(ConfigurationError):
    """The job cannot be replayed as asked."""


class PublishedThroughput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one system for one model from which a published table follows."""

    samples_per_s: float
    """Throughput on ``nodes`` nodes without failures."""
    nodes: int
    exponent: float
    """Exponent α of T(n) = ``samples_per_s`` · (n / ``nodes``)^α, where nothing was measured."""
    global_batch: float
    """Samples of an iteration, which determine the work that a failure discards."""
    restart_s: float
    """Pause at each failure."""
    granularity: int = 1
    """Nodes are used in multiples of this number, where nothing was measured."""
    checkpoint_every: int = 0
    """Iterations between two checkpoints; 0: none."""
    checkpoint_stall_s: float = 0.0
    measured: tuple[float, ...] = ()
    """Measured throughput on ``nodes``, ``nodes`` − 1, … nodes. Beyond both ends the power law continues from
    the nearest measurement. Empty: nothing was measured.
    """
    source: str = ""
    """Origin of the figures, and which of them are fitted."""

    def throughput(self, nodes: int) -> float:
        """Return samples per second on ``nodes`` nodes, of which some may be idle; 0 without nodes."""
        fewer = self.nodes - nodes
        if 0 <= fewer < len(self.measured):
            return self.measured[fewer]
        used = nodes - nodes % self.granularity
        if not used:
            return 0.0
        nearest, known = self.nodes, self.samples_per_s
        if self.measured:
            index = 0 if fewer < 0 else len(self.measured) - 1
            nearest, known = self.nodes - index, self.measured[index]
        return known * math.pow(used / nearest, self.exponent)


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """A job in virtual time. Its planner is the one of real jobs."""

    name: str
    source: str
    """Origin of the profile: a measured file, a job file, or a model card with its sources."""
    profile: ModelProfile
    policy: Policy
    published: Mapping[str, PublishedThroughput] = field(default_factory=dict)
    """Published constants by the name of the system, for example ``varuna``."""
    _iterations: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Known results of ``iteration_s`` by the number of nodes."""

    @cached_property
    def planner(self) -> Planner:
        """The planner of this job.

        :raises JobError: the profile or the policy makes no sense, or no pipeline fits into memory.
        """
        try:
            return Planner(self.profile, self.policy)
        except (InfeasibleError, BatchError) as error:
            raise JobError(f"{self.name} cannot be planned: {error}") from error

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state of the whole model."""
        return sum(layer.state_bytes for layer in self.profile.layers)

    def prepare(self, most_nodes: int) -> None:
        """Compute the templates for up to ``most_nodes`` nodes at once, which is cheaper than one by one.

        :raises JobError: so many nodes cannot hold the model.
        """
        try:
            self.planner.instantiator(most_nodes)
        except InfeasibleError as error:
            raise JobError(f"{self.name} does not fit on {most_nodes} nodes: {error}") from error

    def iteration_s(self, nodes: int) -> float | None:
        """Return the time of a step on ``nodes`` nodes without failures under the best plan; ``None``: there are
        too few nodes.
        """
        if nodes < self.planner.fewest_nodes:
            return None
        found = self._iterations.get(nodes)
        if found is None:
            found = self.planner.instantiator(nodes).best(nodes).iteration_ms / 1e3
            self._iterations[nodes] = found
        return found

    def samples_per_s(self, nodes: int) -> float:
        """Return the throughput on ``nodes`` nodes without failures under the best plan; 0: too few nodes."""
        iteration_s = self.iteration_s(nodes)
        return 0.0 if iteration_s is None else self.policy.global_batch / iteration_s
