"""What every possible stage and pipeline of one model costs, from its profile."""

import math
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from planner.errors import InfeasibleError
from planner.makespan import Floats, PipelineClock, paper_objective_s
from planner.memory import MemoryModel, rows_on_one
from planner.values import LayerProfile, ModelProfile, Policy, StageTemplate


class StageCosts:
    """Tables over stages [u, v) on d devices of a node: index ``[d, u, v]``, infinite where v ≤ u.

    A stage on d devices splits each microbatch by rows, so it takes the time of the fullest device:
    ⌈rows / d⌉ / rows of one device's time. More devices than rows would leave one without work;
    ``max_devices`` forbids it. With activation checkpointing a backward includes a second forward.
    """

    def __init__(self, profile: ModelProfile, policy: Policy) -> None:
        """:raises InfeasibleError: an entry of the profile or the policy makes no sense."""
        check_profile(profile)
        check_policy(policy)
        self.profile, self.policy = profile, policy
        self.layers = len(profile.layers)
        self.devices_per_node = policy.devices_per_node
        self.max_devices = min(policy.devices_per_node, policy.microbatch_rows)
        self.memory = MemoryModel(profile, policy)
        scale = policy.microbatch_rows / profile.microbatch_rows
        forward = [layer.forward_s * scale for layer in profile.layers]
        backward = [layer.backward_s * scale for layer in profile.layers]
        if policy.checkpoint_activations:
            backward = [back + again for back, again in zip(backward, forward, strict=True)]
        both = [there + back for there, back in zip(forward, backward, strict=True)]
        self.forward_s, self.backward_s, self.time_s = map(self._table, (forward, backward, both))
        outputs = [layer.output_bytes * scale for layer in profile.layers]
        crossing = [profile.link_latency_s + size / profile.link_bytes_per_s for size in outputs]
        self.link_s: Floats = np.array([0.0, *crossing[:-1], 0.0])
        """Time from a stage that ends before layer v to the one that begins there; 0 at both ends."""

    def _table(self, layer_s: list[float]) -> Floats:
        table = np.full((self.max_devices + 1, self.layers + 1, self.layers + 1), np.inf)
        for first in range(self.layers):
            # Summed afresh from each start: equal layers give equal stages to the last bit.
            sums = np.cumsum(layer_s[first:])
            for devices in range(1, self.max_devices + 1):
                table[devices, first, first + 1 :] = sums * self.share(devices)
        return table

    def share(self, devices: int) -> float:
        rows = self.policy.microbatch_rows
        return rows_on_one(devices, rows) / rows

    @property
    def most_nodes(self) -> int:
        """Nodes that one pipeline can fill: each stage needs a layer, each node ⌈M / max_devices⌉ stages."""
        return self.layers // -(-self.devices_per_node // self.max_devices)

    def fits(self, devices: int, stages_after: int) -> NDArray[np.bool_]:
        """Which stages fit into a device's memory, shape (L + 1, L + 1)."""
        limit = self.memory.limit_bytes
        if limit is None:
            return np.ones((self.layers + 1, self.layers + 1), dtype=np.bool_)
        fits: NDArray[np.bool_] = self.memory.table(devices, stages_after) <= limit
        return fits

    def stage_times_s(self, stages: tuple[StageTemplate, ...]) -> list[float]:
        return [float(self.time_s[s.devices, s.first_layer, s.end_layer]) for s in stages]

    def clock(self, stages: tuple[StageTemplate, ...]) -> PipelineClock:
        return PipelineClock(
            [float(self.forward_s[s.devices, s.first_layer, s.end_layer]) for s in stages],
            [float(self.backward_s[s.devices, s.first_layer, s.end_layer]) for s in stages],
            [float(self.link_s[s.end_layer]) for s in stages[:-1]],
        )

    def paper_s(self, stages: tuple[StageTemplate, ...]) -> float:
        return paper_objective_s(self.stage_times_s(stages))

    def sync_s(self, stages: tuple[StageTemplate, ...], pipelines: int) -> float:
        """All-reduce of the gradients among their owners, as a ring, where nothing of it is hidden.

        Stages reduce side by side, so the slowest counts. How other pipelines cut the model is not known
        here; each is taken to have as many owners of a layer as this one.
        """
        slowest_s = 0.0
        for stage in stages:
            owners = pipelines * stage.devices
            layers = self.profile.layers[stage.first_layer : stage.end_layer]
            size_bytes = sum(layer.gradient_bytes for layer in layers)
            moved_s = 2 * (owners - 1) / owners * size_bytes / self.profile.link_bytes_per_s
            slowest_s = max(slowest_s, moved_s + 2 * (owners - 1) * self.profile.link_latency_s)
        return slowest_s


def check_profile(profile: ModelProfile) -> None:
    """:raises InfeasibleError: naming the entry that makes no sense."""
    if not profile.layers:
        raise InfeasibleError("the profile has no layers: a model needs at least one")
    for number, layer in enumerate(profile.layers):
        for field in fields(LayerProfile):
            value = getattr(layer, field.name)
            if not math.isfinite(value) or value < 0:
                raise InfeasibleError(f"profile.layers[{number}].{field.name} is {value}; it must be ≥ 0")
    if profile.microbatch_rows < 1:
        raise InfeasibleError(f"profile.microbatch_rows is {profile.microbatch_rows}; it must be ≥ 1")
    if not math.isfinite(profile.link_latency_s) or profile.link_latency_s < 0:
        raise InfeasibleError(f"profile.link_latency_s is {profile.link_latency_s}; it must be ≥ 0")
    if not profile.link_bytes_per_s > 0:
        raise InfeasibleError(f"profile.link_bytes_per_s is {profile.link_bytes_per_s}; it must be > 0")


def check_policy(policy: Policy) -> None:
    """:raises InfeasibleError: naming the setting that makes no sense."""
    least = {"devices_per_node": 1, "tolerate": 0, "global_batch": 1, "microbatch_rows": 1}
    for name, minimum in least.items():
        value = getattr(policy, name)
        if value < minimum:
            raise InfeasibleError(f"policy.{name} is {value}; it must be ≥ {minimum}")
