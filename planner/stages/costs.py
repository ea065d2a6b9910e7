"""Costs of every possible stage and pipeline of one model, computed from its profile."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.errors import InfeasibleError
from planner.stages.layers import explain_no_tensor_split, layer_ms, shard_ms, tensor_ms
from planner.stages.makespan import Floats, Ints, PipelineClock
from planner.stages.memory import MemoryModel, in_flight
from planner.values import (
    LayerProfile,
    Mode,
    ModelProfile,
    Policy,
    Recomputation,
    Recompute,
    SplitTime,
    StageTemplate,
    TensorSplit,
    Within,
)

MOST_DEVICES = 256
"""Limit of a node's devices: the tables grow with their number, and a typing error should not fill the memory."""


class StageCosts:
    """Tables over the stages [u, v) on d devices of a node.

    An index is ``[d, u, v]``, or ``[k, d, u, v]`` where ``modes[k]`` says how the stage recomputes and what
    its devices hold. Entries are infinite where v ≤ u and where no stage can have d devices. A stage of one
    device is the same as replicas, as shards and as tensor-parallel.

    A layer on d devices takes the measured time. Where none was measured, it takes the time of the fullest
    device when the rows of a microbatch are split: ⌈rows / d⌉ / rows of one device's time. Recomputation
    makes the backward pass longer, shards make both passes longer (``layers.shard_ms``), and
    ``layers.tensor_ms`` models tensor parallelism.

    With ``auto`` a stage takes the mode with the least sum of forward and backward time among those that
    fit, which depends on its layers, its devices and the number of stages after it. Among ways to recompute
    no other choice makes a step quicker: forward passes are the same, a step is never quicker where a pass
    takes longer, and a stage's memory depends on its own mode alone. (The paper's objective may fall where
    an earlier stage becomes the slowest; nothing is recomputed for that.) Between recomputation and shards
    the sum is only the criterion that is optimised: shards also make the forward pass longer, which a
    schedule may hide less well.
    """

    def __init__(self, profile: ModelProfile, policy: Policy) -> None:
        """:raises InfeasibleError: an entry of the profile or the policy is invalid."""
        check_profile(profile)
        check_policy(policy)
        self.profile, self.policy = profile, policy
        self.layers = len(profile.layers)
        self.devices_per_node = policy.devices_per_node
        self.stage_devices = _stage_devices(profile, policy)
        """Numbers of devices that a stage can have, ascending."""
        self.max_devices = self.stage_devices[-1]
        _check_within(profile, policy, self.max_devices)
        self.memory = MemoryModel(profile, policy)
        self.modes = _modes(profile, policy, self.memory, self.stage_devices)
        """Modes that a stage can have; of equally quick modes the first is taken."""
        self._mode_numbers = {mode: number for number, mode in enumerate(self.modes)}
        first = self.modes[0]
        alone = tuple(
            number
            for number, mode in enumerate(self.modes)
            if mode == first._replace(recompute=mode.recompute)
        )
        self._modes_of = alone, tuple(range(len(self.modes)))
        self._tensor_replicas = {d: _tensor_replicas(profile, policy, d) for d in self.stage_devices}
        self._fits: dict[tuple[int, int, int], NDArray[np.bool_]] = {}
        self._quickest: dict[tuple[int, int], Ints] = {}
        self._scale = policy.microbatch_rows / profile.microbatch_rows
        shape = (self.max_devices + 1, self.layers + 1, self.layers + 1)
        self.forward_ms, self.backward_ms, self.time_ms = (
            np.full((len(self.modes), *shape), np.inf) for _ in range(3)
        )
        for devices in self.stage_devices:
            for number, mode in enumerate(self.modes):
                if not self._is_possible(mode, devices):
                    continue
                times = [_layer_ms(profile, policy, layer, devices, mode) for layer in profile.layers]
                if not math.isfinite(sum(forward + backward for forward, backward in times)):
                    raise InfeasibleError("the times of profile.layers add up to more than a number can hold")
                _sum_ranges(self.forward_ms[number, devices], [forward for forward, _ in times])
                _sum_ranges(self.backward_ms[number, devices], [backward for _, backward in times])
                _sum_ranges(
                    self.time_ms[number, devices], [forward + backward for forward, backward in times]
                )
        outputs = [layer.output_bytes * self._scale for layer in profile.layers]
        crossing = [profile.link.time_ms(size) for size in outputs]
        self.link_ms: Floats = np.array([0.0, *crossing[:-1], 0.0])
        """Time from a stage that ends before layer v to the stage that begins there; 0 at both ends of the
        model.
        """
        gradients = [layer.gradient_bytes for layer in profile.layers]
        self._gradients_before = [0, *accumulate(gradients)]

    def can_start(self, position: int, devices: int) -> bool:
        """Return whether a stage of ``devices`` devices can begin at device ``position`` of a node."""
        aligned = self.policy.split == "any" or position % devices == 0
        return aligned and position + devices <= self.devices_per_node

    def sizes_before(self, left: int) -> list[int]:
        """Return the sizes of a stage that is the first of a pipeline's last ``left`` devices and stays within its
        node.
        """
        position = -left % self.devices_per_node
        return [d for d in self.stage_devices if self.can_start(position, d)]

    @cached_property
    def node_splits(self) -> tuple[tuple[int, ...], ...]:
        """All ways to split a node's devices, in order, into stages: up to 2^(M − 1) for M devices."""
        splits: list[list[tuple[int, ...]]] = [[()]]
        for end in range(1, self.devices_per_node + 1):
            splits.append([(*front, d) for d in self._sizes_ending_at(end) for front in splits[end - d]])
        return tuple(splits[-1])

    @cached_property
    def split_counts(self) -> dict[int, int]:
        """Number of ``node_splits`` for each number of stages, ascending; counted without listing the splits."""
        counts: list[dict[int, int]] = [{0: 1}]
        for end in range(1, self.devices_per_node + 1):
            here: dict[int, int] = {}
            for d in self._sizes_ending_at(end):
                for stages, ways in counts[end - d].items():
                    here[stages + 1] = here.get(stages + 1, 0) + ways
            counts.append(here)
        return dict(sorted(counts[-1].items()))

    def _sizes_ending_at(self, end: int) -> list[int]:
        return [d for d in self.stage_devices if d <= end and self.can_start(end - d, d)]

    @property
    def fewest_stages(self) -> int:
        """Fewest stages of a node all of whose devices are used."""
        return min(self.split_counts)

    @property
    def most_nodes(self) -> int:
        """Most nodes that one pipeline can fill, as each stage needs a layer."""
        return self.layers // self.fewest_stages

    def mode_fits(self, mode: int, devices: int, stages_after: int) -> NDArray[np.bool_]:
        """Return which stages fit into a device's memory in ``modes[mode]``, shape (L + 1, L + 1)."""
        limit = self.memory.limit_bytes
        possible = self._is_possible(self.modes[mode], devices)
        if limit is None or not possible:
            return np.full((self.layers + 1, self.layers + 1), possible)
        key = mode, devices, in_flight(stages_after, self.policy.microbatches)
        known = self._fits.get(key)
        if known is None:
            table = self.memory.table(devices, stages_after, self.modes[mode])
            known = self._fits[key] = table <= limit
        return known

    def quickest_modes(self, devices: int, stages_after: int) -> Ints:
        """Return for each stage the number in ``modes`` of the quickest mode that fits, shape (L + 1, L + 1).

        The number is -1 where no mode fits.
        """
        key = devices, in_flight(stages_after, self.policy.microbatches)
        known = self._quickest.get(key)
        if known is None:
            fitting = [self.mode_fits(mode, devices, stages_after) for mode in range(len(self.modes))]
            if len(self.modes) == 1:
                known = np.where(fitting[0], 0, -1)
            else:
                times = np.where(fitting, self.time_ms[:, devices], np.inf)
                known = np.where(np.logical_or.reduce(fitting), times.argmin(axis=0), -1)
            self._quickest[key] = known
        return known

    def quickest_ms(self, devices: int, stages_after: int) -> Floats:
        """Return the time of each stage in its quickest mode, infinite where none fits, shape (L + 1, L + 1)."""
        fitting = [self.mode_fits(mode, devices, stages_after) for mode in range(len(self.modes))]
        times: Floats = np.where(fitting, self.time_ms[:, devices], np.inf).min(axis=0)
        return times

    def may_be_quickest(
        self, mode: int, devices: int, fewest_after: int, most_after: int
    ) -> NDArray[np.bool_]:
        """Return which stages may have ``modes[mode]`` as their quickest mode that fits, shape (L + 1, L + 1), where
        from ``fewest_after`` to ``most_after`` stages come after a stage.
        """
        fits = self.mode_fits(mode, devices, fewest_after)
        if len(self.modes) == 1:
            return fits
        quickest: NDArray[np.bool_] = self.time_ms[mode, devices] <= self.quickest_ms(devices, most_after)
        return fits & quickest

    def modes_of(self, devices: int) -> tuple[int, ...]:
        """Return the numbers of the modes that a stage of ``devices`` devices can have, without those that are
        the same for it.
        """
        return tuple(
            number for number in self._modes_of[devices > 1] if self._is_possible(self.modes[number], devices)
        )

    def _is_possible(self, mode: Mode, devices: int) -> bool:
        """Return whether a stage of ``devices`` devices can work in ``mode``."""
        if devices == 1:
            return True
        if mode.within == "tensor":
            return mode.replicas in self._tensor_replicas.get(devices, ())
        sizes = self.profile.stage_devices
        return devices <= self.policy.microbatch_rows if sizes is None else devices in sizes

    def mode(self, first_layer: int, end_layer: int, devices: int, stages_after: int) -> Mode:
        """Return the mode of a stage: the quickest that fits or, if none fits, the one that needs least
        memory.
        """
        number = 0
        if len(self.modes) > 1:
            number = int(self.quickest_modes(devices, stages_after)[first_layer, end_layer])
        if number < 0:
            number = min(
                self.modes_of(devices),
                key=lambda number: self.memory.stage_bytes(
                    first_layer, end_layer, devices, stages_after, self.modes[number]
                ),
            )
        return self.modes[number].of(devices)

    def stages(self, cuts: Sequence[int], devices: Sequence[int]) -> tuple[StageTemplate, ...]:
        """Return the stages between ``cuts`` (from 0 to L), where stage i has ``devices[i]`` devices."""
        used = [0, *accumulate(devices)]
        last = len(devices) - 1
        stages = []
        for number, ((first, end), d) in enumerate(zip(pairwise(cuts), devices, strict=True)):
            mode = self.mode(first, end, d, last - number)
            stages.append(
                StageTemplate(
                    first_layer=first,
                    end_layer=end,
                    node_offset=used[number] // self.devices_per_node,
                    devices=d,
                    **mode._asdict(),
                )
            )
        return tuple(stages)

    def spans(self, stages: Iterable[StageTemplate]) -> list[tuple[int, int, int, int]]:
        """Return each stage's index into the tables."""
        found = []
        for stage in stages:
            mode = stage.mode
            if stage.devices == 1:
                mode = self.modes[0]._replace(recompute=stage.recompute)
            found.append((self._mode_numbers[mode], stage.devices, stage.first_layer, stage.end_layer))
        return found

    def stage_times_ms(self, stages: tuple[StageTemplate, ...]) -> list[float]:
        return [float(self.time_ms[span]) for span in self.spans(stages)]

    def pipeline_ms(self, stages: tuple[StageTemplate, ...]) -> tuple[list[float], list[float], list[float]]:
        """Return forward and backward times of each stage, and the time of the link from each to the next."""
        spans = self.spans(stages)
        return (
            [float(self.forward_ms[span]) for span in spans],
            [float(self.backward_ms[span]) for span in spans],
            [float(self.link_ms[s.end_layer]) for s in stages[:-1]],
        )

    def clock(self, stages: tuple[StageTemplate, ...]) -> PipelineClock:
        return PipelineClock(*self.pipeline_ms(stages))

    def sync_ms(self, stages: tuple[StageTemplate, ...], pipelines: int) -> float:
        """Return the time of a ring all-reduce of the gradients among their owners, without any overlap.

        Stages reduce in parallel, so the slowest counts. How other pipelines cut the model is not known
        here; each is assumed to have as many owners of a layer as this one.
        """
        slowest_ms = 0.0
        for in_pipeline, size_bytes in self.gradient_bytes(stages).items():
            owners = pipelines * in_pipeline
            hop_ms = self.profile.ring.time_ms(size_bytes / owners)
            slowest_ms = max(slowest_ms, 2 * (owners - 1) * hop_ms)
        return slowest_ms

    def step_cost(
        self, stages: tuple[StageTemplate, ...], pipelines: int, slowness: Sequence[float] | None = None
    ) -> Callable[[int], float]:
        """Return a function from a number of microbatches to the milliseconds of a step of one of
        ``pipelines`` pipelines: its makespan and the all-reduce of the gradients.

        :param slowness: factor by which each stage takes longer than the profile says.
        """
        forward_ms, backward_ms, link_ms = self.pipeline_ms(stages)
        if slowness is not None:
            forward_ms = [time_ms * factor for time_ms, factor in zip(forward_ms, slowness, strict=True)]
            backward_ms = [time_ms * factor for time_ms, factor in zip(backward_ms, slowness, strict=True)]
        clock, sync_ms = PipelineClock(forward_ms, backward_ms, link_ms), self.sync_ms(stages, pipelines)
        return lambda microbatches: clock.makespan_ms(microbatches) + sync_ms

    def gradient_bytes(self, stages: tuple[StageTemplate, ...]) -> dict[int, float]:
        """Return the bytes of gradients that each device of the heaviest stage reduces, by the number of
        owners of the same elements in one pipeline: all devices of a stage of replicas, one device of a
        stage of shards, one of each replica of a tensor-parallel stage.
        """
        heaviest: dict[int, float] = {}
        for stage in stages:
            size_bytes = self._gradients_before[stage.end_layer] - self._gradients_before[stage.first_layer]
            owners = stage.devices // stage.parts
            heaviest[owners] = max(size_bytes / stage.parts, heaviest.get(owners, 0.0))
        return heaviest


def _sum_ranges(table: Floats, times_ms: list[float]) -> None:
    """Write the sum of ``times_ms[u:v]`` to ``table[u, v]``, for all u < v."""
    for first in range(len(times_ms)):
        # Each start is summed separately, so that equal layers give stages with equal times to the last
        # bit.
        table[first, first + 1 :] = np.cumsum(times_ms[first:])


def _layer_ms(
    profile: ModelProfile, policy: Policy, layer: LayerProfile, devices: int, mode: Mode
) -> tuple[float, float]:
    """Return forward and backward time of one microbatch of one layer, including what its devices exchange."""
    if mode.within == "tensor" and devices > 1:
        return tensor_ms(profile, policy, layer, devices // mode.replicas, mode.recompute, mode.replicas)
    forward_ms, backward_ms = layer_ms(profile, policy, layer, devices, mode.recompute)
    if mode.within == "replicate":
        return forward_ms, backward_ms
    there_ms, back_ms = shard_ms(profile, layer, devices)
    return forward_ms + there_ms, backward_ms + back_ms


def _modes(
    profile: ModelProfile, policy: Policy, memory: MemoryModel, stage_devices: Sequence[int]
) -> tuple[Mode, ...]:
    """Return the modes among which a stage's mode is chosen.

    :raises InfeasibleError: ``selective`` is requested, and the profile has no measurement of it.
    """
    recomputes = _recomputes(profile, policy, memory.limit_bytes)
    several = [devices for devices in stage_devices if devices > 1]
    withins: list[tuple[Within, int]] = [("replicate", 1)]
    tensor: list[tuple[Within, int]] = [
        ("tensor", count)
        for count in sorted({count for d in several for count in _tensor_replicas(profile, policy, d)})
    ]
    if several and policy.within_node == "shard":
        withins = [("shard", 1)]
    elif several and policy.within_node == "tensor":
        withins = tensor
    elif several and policy.within_node == "auto":
        layers, limit = len(profile.layers), memory.limit_bytes
        largest = [
            memory.stage_bytes(0, layers, devices, layers - 1, Mode(recomputes[0])) for devices in several
        ]
        tight = limit is not None and max(largest) > limit
        # Shards are never quicker, so they are only for stages that may not fit otherwise.
        if tight and profile.shard_problem is None:
            withins.append(("shard", 1))
        # Tensor parallelism is not quicker either where rows can be split evenly.
        uneven = any(policy.microbatch_rows % devices for devices in several)
        if tight or uneven:
            withins += tensor
    return tuple(Mode(recompute, *within) for recompute in recomputes for within in withins)


def _tensor_replicas(profile: ModelProfile, policy: Policy, devices: int) -> tuple[int, ...]:
    """Return the numbers of replicas that ``devices`` devices of a tensor-parallel stage can be, ascending.

    Where the policy requires tensor parallelism, only the fewest count: each device then has as little
    state as the model allows.
    """
    possible = tuple(
        count
        for count in range(1, min(devices // 2, policy.microbatch_rows) + 1)
        if devices % count == 0 and explain_no_tensor_split(profile, devices // count) is None
    )
    return possible[:1] if policy.within_node == "tensor" else possible


def _recomputes(profile: ModelProfile, policy: Policy, limit_bytes: int | None) -> tuple[Recompute, ...]:
    """Return the ways to recompute that the policy permits.

    :raises InfeasibleError: ``selective`` is requested, and the profile has no measurement of it.
    """
    wanted = policy.activation_checkpointing
    missing = [number for number, layer in enumerate(profile.layers) if layer.selective is None]
    if wanted == "auto":
        if limit_bytes is None:
            return ("none",)
        return ("none", "full") if missing else ("none", "selective", "full")
    if wanted == "selective" and missing:
        raise InfeasibleError(
            f"activation_checkpointing = selective, and profile.layers[{missing[0]}].selective is missing: "
            "the layer was not measured so, or cannot be recomputed so; measure the model again, or use full"
        )
    return (wanted,)


def _check_within(profile: ModelProfile, policy: Policy, most: int) -> None:
    """Check that a stage can have shards if the policy requires them.

    :param most: devices of the largest stage.
    :raises InfeasibleError: ``shard`` is requested, and no stage can have shards.
    """
    if policy.within_node != "shard" or policy.devices_per_node == 1:
        return
    if profile.shard_problem is not None:
        raise InfeasibleError(
            f"within_node = shard, and this job cannot have shards: {profile.shard_problem}; use "
            "within_node = replicate, or auto"
        )
    if most == 1:
        rows = policy.microbatch_rows
        why = "the profile knows stages of 1 device only" if rows > 1 else "a microbatch of 1 keeps one busy"
        remedy = "within_node = auto" if rows > 1 else "a microbatch of 2 or more, or within_node = auto"
        raise InfeasibleError(
            f"within_node = shard, and no stage has a second device to hold shards: {why}; use {remedy}"
        )


def _stage_devices(profile: ModelProfile, policy: Policy) -> tuple[int, ...]:
    """Return the numbers of devices that a stage can have, ascending.

    :raises InfeasibleError: the devices of a node cannot be split into such stages.
    """
    most = policy.devices_per_node
    measured = profile.stage_devices
    tensor = [d for d in range(1, most + 1) if d == 1 or _tensor_replicas(profile, policy, d)]
    allowed = tuple(range(1, min(most, policy.microbatch_rows) + 1)) if measured is None else measured
    if policy.within_node == "tensor" and most > 1:
        allowed = tuple(d for d in tensor if measured is None or d in measured)
        if max(allowed, default=1) == 1:
            problem = explain_no_tensor_split(profile) or explain_no_tensor_split(
                profile, max(measured or (most,))
            )
            raise InfeasibleError(
                "within_node = tensor, and no stage can compute its layers in parts: "
                f"{problem or 'the profile knows stages of 1 device only'}; use within_node = replicate, shard or "
                "auto, or another number of devices per node"
            )
    elif policy.within_node == "auto" and measured is None:
        allowed = tuple(sorted({*allowed, *tensor}))
    known = ", ".join(map(str, allowed))
    halves = measured is not None and measured[-1] > 1 and not any(d & (d - 1) for d in measured)
    if halves and most & (most - 1):
        raise InfeasibleError(
            f"policy.devices_per_node is {most}, and the profile knows stages of {known} devices; "
            f"use {_powers_around(most)} devices per node"
        )
    if policy.split == "aligned":
        if most & (most - 1):
            raise InfeasibleError(
                f"policy.devices_per_node is {most}, and split = aligned needs a power of two; use "
                f"{_powers_around(most)}, or split = any"
            )
        allowed = tuple(d for d in allowed if not d & (d - 1))
        if not allowed:
            raise InfeasibleError(
                f"split = aligned needs stages of 1, 2, 4 … devices, and profile.stage_devices is {known}; "
                "use split = any"
            )
    reachable = _reachable(allowed, most + allowed[0])
    if most not in reachable:
        works = [max((n for n in reachable if n < most), default=0), min(n for n in reachable if n > most)]
        raise InfeasibleError(
            f"policy.devices_per_node is {most}, and stages of {known} devices cannot use all of them; "
            f"use {' or '.join(str(n) for n in works if n)} devices per node"
        )
    return tuple(d for d in allowed if d <= most)


def _reachable(sizes: tuple[int, ...], most: int) -> set[int]:
    """Return the numbers of devices up to ``most`` that are sums of ``sizes``."""
    reachable = {0}
    for end in range(1, most + 1):
        if any(end - d in reachable for d in sizes):
            reachable.add(end)
    return reachable


def _powers_around(number: int) -> str:
    below = 1 << (number.bit_length() - 1)
    return f"{below} or {2 * below}"


def check_profile(profile: ModelProfile) -> None:
    """Check that the profile's entries are in their ranges.

    :raises InfeasibleError: an entry is not; the message names it.
    """
    if not profile.layers:
        raise InfeasibleError("the profile has no layers: a model needs at least one")
    for number, layer in enumerate(profile.layers):
        _check_layer(f"profile.layers[{number}]", layer)
    _check_least("profile.microbatch_rows", profile.microbatch_rows, 1)
    if profile.device_memory_bytes is not None:
        _check_least("profile.device_memory_bytes", profile.device_memory_bytes, 1)
    sizes = profile.stage_devices
    if sizes is not None and (not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes))):
        raise InfeasibleError(
            f"profile.stage_devices is {list(sizes)}; it must be numbers ≥ 1, at least one, ascending"
        )
    for name in ("link", "ring", "inner"):
        link = getattr(profile, name)
        if link is None:
            continue
        _check_amount(f"profile.{name}.latency_ms", link.latency_ms)
        if not link.bytes_per_s > 0:
            raise InfeasibleError(f"profile.{name}.bytes_per_s is {link.bytes_per_s}; it must be > 0")


def _check_layer(name: str, layer: LayerProfile) -> None:
    for field in LayerProfile.__struct_fields__:
        if field not in ("split", "tensor", "full", "selective"):
            _check_amount(f"{name}.{field}", getattr(layer, field))
    for mode, again in (("full", layer.full), ("selective", layer.selective)):
        for field in Recomputation.__struct_fields__ if again is not None else ():
            _check_amount(f"{name}.{mode}.{field}", getattr(again, field))
    for field in TensorSplit.__struct_fields__ if layer.tensor is not None else ():
        _check_amount(f"{name}.tensor.{field}", getattr(layer.tensor, field))
    for number, split in enumerate(layer.split):
        entry = f"{name}.split[{number}]"
        _check_least(f"{entry}.devices", split.devices, 2)
        for field in SplitTime.__struct_fields__:
            if getattr(split, field) is not None:
                _check_amount(f"{entry}.{field}", getattr(split, field))
        if any(split.devices == other.devices for other in layer.split[:number]):
            raise InfeasibleError(f"{entry}.devices is {split.devices}, and so is that of an entry before it")


def _check_amount(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise InfeasibleError(f"{name} is {value}; it must be ≥ 0 and finite")


def _check_least(name: str, value: int, least: int) -> None:
    # Written so that NaN is rejected as well.
    if not value >= least:
        raise InfeasibleError(f"{name} is {value}; it must be ≥ {least}")


def check_policy(policy: Policy) -> None:
    """Check that the policy's settings are in their ranges.

    :raises InfeasibleError: a setting is not; the message names it.
    """
    least = {"devices_per_node": 1, "tolerate": 0, "global_batch": 1, "microbatch_rows": 1}
    for name, minimum in least.items():
        _check_least(f"policy.{name}", getattr(policy, name), minimum)
    if policy.device_memory_bytes is not None:
        _check_least("policy.device_memory_bytes", policy.device_memory_bytes, 1)
    if policy.devices_per_node > MOST_DEVICES:
        raise InfeasibleError(
            f"policy.devices_per_node is {policy.devices_per_node}; it must be ≤ {MOST_DEVICES}"
        )
