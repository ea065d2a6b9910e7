"""Oracles for the planner: slow and obvious algorithms that share no code with it."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import ceil
from random import Random

import msgspec
from msgspec.structs import replace

from planner.values import (
    LayerProfile,
    Link,
    ModelProfile,
    Plan,
    Policy,
    Recomputation,
    Recompute,
    Situation,
    SplitTime,
    Within,
)

Stage = tuple[int, int, int]
"""(first layer, end layer, devices)."""
Way = tuple[Recompute, Within]
"""Way in which a stage gets its activations in the backward pass, and the state that its devices hold."""


def layer(
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    state_bytes: int = 12,
    activation_bytes: int = 4,
    output_bytes: int = 0,
    selective: Recomputation | None = None,
) -> LayerProfile:
    """Return a layer's profile; ``state_bytes`` is split 1 : 1 : 2 between parameters, gradients and
    optimizer.
    """
    return LayerProfile(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameter_bytes=state_bytes // 4,
        gradient_bytes=state_bytes // 4,
        optimizer_bytes=state_bytes // 2,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        selective=selective,
    )


def profile_of(times_ms: Sequence[float], memory_bytes: int | None = None, rows: int = 4) -> ModelProfile:
    """Return a model of layers whose forward and backward times add up to ``times_ms``; communication takes no
    time.
    """
    return ModelProfile(
        layers=tuple(layer(forward_ms=time / 4, backward_ms=time * 3 / 4) for time in times_ms),
        microbatch_rows=rows,
        device_memory_bytes=memory_bytes,
        link=Link(latency_ms=0.0),
        ring=Link(latency_ms=0.0, bytes_per_s=1e12),
    )


def random_model(random: Random, objective: str = "iteration") -> tuple[ModelProfile, Policy, int]:
    """Return a model, a policy and a number of nodes, small enough to try every mapping.

    Half of the models have times that doubles cannot hold exactly, and half have a memory limit. Node
    splits, times measured on several devices, recomputation and shards vary as well.
    """
    devices, rows = random.randint(1, 4), random.choice([1, 2, 4, 4])
    exact, measured, selective = (random.random() < 0.5 for _ in range(3))
    checkpointing = random.choice(["none", "selective" if selective else "none", "full", "auto", "auto"])

    def time_ms(least: float) -> float:
        time = random.choice([least, least * random.randint(1, 20) / 4])
        return time if exact else time * random.uniform(0.9, 1.1)

    layers = tuple(
        LayerProfile(
            forward_ms=time_ms(1.0),
            backward_ms=time_ms(2.0),
            parameter_bytes=random.randint(0, 9),
            gradient_bytes=random.randint(0, 9),
            optimizer_bytes=random.randint(0, 9),
            activation_bytes=random.randint(0, 9),
            output_bytes=random.randint(0, 9),
            buffer_bytes=random.choice([0, 0, random.randint(0, 9)]),
            full=Recomputation(activation_bytes=random.randint(0, 6), recompute_ms=time_ms(0.5))
            if random.random() < 0.5
            else None,
            selective=Recomputation(activation_bytes=random.randint(0, 6), recompute_ms=time_ms(0.25))
            if selective
            else None,
            split=tuple(
                SplitTime(
                    devices=d,
                    forward_ms=time_ms(1 / d),
                    backward_ms=time_ms(2 / d),
                    activation_bytes=random.choice([None, random.randint(0, 9)]),
                )
                for d in range(2, devices + 1)
                if measured and random.random() < 0.8
            ),
        )
        for _ in range(random.randint(1, 7 if devices < 4 else 6))
    )
    split = random.choice(["any", "aligned"]) if devices in (1, 2, 4) else "any"
    profile = ModelProfile(
        layers=layers,
        microbatch_rows=rows,
        device_memory_bytes=random.choice([None, random.randint(20, 200)]),
        stage_devices=random.choice([None, (1,), (1, 2), (1, 2, 4) if devices != 3 else (1, 3)]),
        link=Link(latency_ms=random.choice([0.0, 0.5]), bytes_per_s=8e3),
    )
    if devices == 3 and profile.stage_devices == (1, 2):
        profile = replace(profile, stage_devices=(1, 2, 3))
    policy = Policy(
        devices_per_node=devices,
        global_batch=rows * random.randint(1, 12),
        microbatch_rows=rows,
        objective="paper" if objective == "paper" else "iteration",
        split="aligned" if split == "aligned" else "any",
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
    )
    profile, policy = with_shards(random, profile, policy)
    return profile, policy, random.randint(1, 3 if devices < 4 else 2)


def with_shards(random: Random, profile: ModelProfile, policy: Policy) -> tuple[ModelProfile, Policy]:
    """Allow stages of several devices to hold shards or not; the link is slow, fast or not measured."""
    inner = Link(latency_ms=random.choice([0.0, 0.125]), bytes_per_s=random.choice([8e3, 64e3, 1e12]))
    within = random.choice(["replicate", "auto", "auto", "shard"])
    if max(max(split) for split in node_splits(profile, policy)) == 1:
        within = "auto"
    return (
        replace(profile, inner=random.choice([None, inner])),
        msgspec.structs.replace(policy, within_node=within),
    )


def operations(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the operations of a stage in the textbook order of 1F1B."""
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", m) for m in range(ahead)]
    for m in range(ahead, microbatches):
        order += [("F", m), ("B", m - ahead)]
    return order + [("B", m) for m in range(microbatches - ahead, microbatches)]


def simulated_makespan_ms(
    forward_ms: Sequence[float], backward_ms: Sequence[float], link_ms: Sequence[float], microbatches: int
) -> float:
    """Simulate the schedule: perform any operation that is possible next, until all are done."""
    stages = len(forward_ms)
    todo = [operations(stage, stages, microbatches) for stage in range(stages)]
    free = [0.0] * stages
    done: dict[tuple[str, int, int], float] = {}
    while any(todo):
        for stage in range(stages):
            while todo[stage]:
                kind, m = todo[stage][0]
                step = -1 if kind == "F" else 1
                neighbour = stage + step
                ready = 0.0
                if 0 <= neighbour < stages:
                    if (kind, neighbour, m) not in done:
                        break
                    ready = done[kind, neighbour, m] + link_ms[min(stage, neighbour)]
                elif kind == "B":
                    ready = done["F", stage, m]
                cost = forward_ms[stage] if kind == "F" else backward_ms[stage]
                free[stage] = done[kind, stage, m] = max(free[stage], ready) + cost
                todo[stage].pop(0)
    return max(free)


def compositions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, min(total, largest) + 1):
        for rest in compositions(total - first, largest):
            yield (first, *rest)


def node_splits(profile: ModelProfile, policy: Policy) -> list[tuple[int, ...]]:
    """Return the ways to split a node's devices into stages that the profile and the policy allow."""
    splits = []
    for split in compositions(policy.devices_per_node, policy.devices_per_node):
        starts = [sum(split[:index]) for index in range(len(split))]
        aligned = all(d in (1, 2, 4, 8) and start % d == 0 for d, start in zip(split, starts, strict=True))
        if profile.stage_devices is None:
            known = max(split) <= policy.microbatch_rows
        else:
            known = set(split) <= set(profile.stage_devices)
        if known and (aligned or policy.split == "any"):
            splits.append(split)
    return splits


def all_mappings(profile: ModelProfile, policy: Policy, nodes: int) -> Iterator[tuple[Stage, ...]]:
    layers = len(profile.layers)
    for splits in product(node_splits(profile, policy), repeat=nodes):
        sizes = [size for split in splits for size in split]
        for cuts in combinations(range(1, layers), len(sizes) - 1):
            edges = [0, *cuts, layers]
            yield tuple(zip(edges, edges[1:], sizes, strict=False))


def stage_ms(
    profile: ModelProfile,
    stage: Stage,
    rows: int,
    recompute: Recompute = "none",
    within: Within = "replicate",
) -> tuple[float, float]:
    """Return forward and backward time of a stage: measured if the profile has it, else by the rows of the
    fullest device.

    Shards transfer a share of the parameters in each pass, and of the gradients in the backward pass, one
    time fewer than there are devices.
    """
    first, end, devices = stage
    forward_ms = backward_ms = 0.0
    inner = profile.ring if profile.inner is None else profile.inner
    for x in profile.layers[first:end]:
        measured = [split for split in x.split if split.devices == devices]
        if measured:
            there, back = measured[0].forward_ms, measured[0].backward_ms
        else:
            there, back = (time * -(-rows // devices) / rows for time in (x.forward_ms, x.backward_ms))
        again = there if recompute == "full" else 0.0
        if recompute == "selective" or (recompute == "full" and x.full is not None):
            measured_again = x.selective if recompute == "selective" else x.full
            assert measured_again is not None
            again = measured_again.recompute_ms * (there / x.forward_ms if x.forward_ms else 1.0)
        forward_ms += there * rows / profile.microbatch_rows
        backward_ms += (back + again) * rows / profile.microbatch_rows
        if within == "shard" and devices > 1:
            gather_ms, scatter_ms = (
                (devices - 1) * (inner.latency_ms + size / devices / inner.bytes_per_s * 1e3) if size else 0.0
                for size in (max(x.parameter_bytes - x.buffer_bytes, 0), x.gradient_bytes)
            )
            forward_ms += gather_ms
            backward_ms += gather_ms + scatter_ms
    return forward_ms, backward_ms


def ways(profile: ModelProfile, policy: Policy, devices: int) -> list[Way]:
    """Return the ways in which a stage of this number of devices may work."""
    recomputes: list[Recompute]
    if policy.activation_checkpointing != "auto":
        recomputes = [policy.activation_checkpointing]
    elif all(layer.selective is not None for layer in profile.layers):
        recomputes = ["none", "selective", "full"]
    else:
        recomputes = ["none", "full"]
    withins: list[Within] = ["replicate", "shard"]
    if policy.within_node != "auto":
        withins = [policy.within_node]
    if devices == 1:
        withins = ["replicate"]
    return list(product(recomputes, withins))


def quickest_way(profile: ModelProfile, policy: Policy, stage: Stage, last: int) -> Way | None:
    """Return the fastest way that fits, the first of several equally fast ones, or ``None`` if none fits."""
    limit = policy.device_memory_bytes or profile.device_memory_bytes
    fitting = [
        way
        for way in ways(profile, policy, stage[2])
        if limit is None or stage_bytes(profile, policy, stage, last, *way) <= limit
    ]
    rows = policy.microbatch_rows
    return min(fitting, key=lambda way: sum(stage_ms(profile, stage, rows, *way)), default=None)


def stage_bytes(
    profile: ModelProfile,
    policy: Policy,
    stage: Stage,
    last: int,
    recompute: Recompute = "none",
    within: Within = "replicate",
) -> int:
    first, end, devices = stage
    layers = profile.layers[first:end]
    alive = min(last + 1, policy.microbatches)
    state = sum(x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes for x in layers)
    if within == "shard" and devices > 1:
        state, gathered = 0, 0
        for x in layers:
            divided = max(x.parameter_bytes - x.buffer_bytes, 0)
            state += x.parameter_bytes - divided
            state += sum(ceil(size / devices) for size in (divided, x.gradient_bytes, x.optimizer_bytes))
            gathered = max(gathered, 2 * divided + x.gradient_bytes)
        state += gathered
    rows = -(-policy.microbatch_rows // devices)
    scales = []
    for x in layers:
        scales.append(Fraction(rows, profile.microbatch_rows))
        for split in x.split:
            if split.devices == devices and split.activation_bytes is not None and x.activation_bytes:
                grown = Fraction(policy.microbatch_rows, profile.microbatch_rows)
                scales[-1] = Fraction(split.activation_bytes, x.activation_bytes) * grown
    # Sizes of single layers are rounded up to whole bytes of the measured rows.
    unit = profile.microbatch_rows

    def total(sizes: list[int]) -> int:
        return sum(ceil(size * scale * unit) for size, scale in zip(sizes, scales, strict=True))

    if recompute == "none":
        return state + ceil(Fraction(total([x.activation_bytes for x in layers]) * alive, unit))
    inputs = [profile.layers[i - 1].output_bytes if i else 0 for i in range(first, end)]
    kept, again = [], []
    for x, given, scale in zip(layers, inputs, scales, strict=True):
        whole = given if x.full is None else x.full.activation_bytes
        inside = x.activation_bytes if x.full is None else max(x.activation_bytes - whole, 0)
        if x.full is not None:
            inside = min(inside + (given or x.output_bytes), x.activation_bytes)
        again.append(ceil(inside * scale * unit))
        if recompute == "selective":
            assert x.selective is not None
            whole = x.selective.activation_bytes
        kept.append(whole)
    return state + ceil(Fraction(total(kept) * alive + max(again), unit))


def fits(profile: ModelProfile, policy: Policy, mapping: Sequence[Stage]) -> bool:
    return all(
        quickest_way(profile, policy, stage, len(mapping) - 1 - number) is not None
        for number, stage in enumerate(mapping)
    )


def paper_ms(times_ms: Sequence[float]) -> float:
    """Return T1 + T2 + T3 of Eq. 1–4 written out, with N_b = 4S."""
    stages = len(times_ms)
    k = max(range(stages), key=lambda index: (times_ms[index], index))
    t1 = sum(times_ms)
    t2 = (4 * stages - stages + k - 1) * times_ms[k]
    return t1 + t2 + sum(times_ms[k:])


def mapping_ms(profile: ModelProfile, policy: Policy, mapping: Sequence[Stage], microbatches: int) -> float:
    """Return the policy's objective for a mapping that fits."""
    times = []
    for number, stage in enumerate(mapping):
        way = quickest_way(profile, policy, stage, len(mapping) - 1 - number)
        assert way is not None
        times.append(stage_ms(profile, stage, policy.microbatch_rows, *way))
    return pipeline_ms(profile, policy, mapping, times, microbatches)


def pipeline_ms(
    profile: ModelProfile,
    policy: Policy,
    mapping: Sequence[Stage],
    times: Sequence[tuple[float, float]],
    microbatches: int,
) -> float:
    """Return the policy's objective for these forward and backward times of the stages."""
    if policy.objective == "paper":
        return paper_ms([there + back for there, back in times])
    links = [
        profile.link.latency_ms + profile.layers[end - 1].output_bytes / profile.link.bytes_per_s * 1e3
        for _, end, _ in mapping[:-1]
    ]
    return simulated_makespan_ms([t for t, _ in times], [t for _, t in times], links, microbatches)


def best_mapping_ms(profile: ModelProfile, policy: Policy, nodes: int, microbatches: int) -> float | None:
    scores = [
        mapping_ms(profile, policy, mapping, microbatches)
        for mapping in all_mappings(profile, policy, nodes)
        if fits(profile, policy, mapping)
    ]
    return min(scores, default=None)


def multisets(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``total`` as a sum of sizes, largest first."""
    if total == 0:
        yield ()
    for size in sizes:
        if size <= total:
            for rest in multisets(total - size, [s for s in sizes if s <= size]):
                yield (size, *rest)


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to distribute ``total`` microbatches, at least one to each part."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = [0, *cuts, total]
        yield tuple(b - a for a, b in pairwise(edges))


def check_way(profile: ModelProfile, policy: Policy, stage: Stage, last: int, taken: Way) -> None:
    """Check that the chosen way fits, and that no other way that fits is faster, up to rounding."""
    best = quickest_way(profile, policy, stage, last)
    assert best is not None
    limit = policy.device_memory_bytes or profile.device_memory_bytes
    assert taken in ways(profile, policy, stage[2])
    assert limit is None or stage_bytes(profile, policy, stage, last, *taken) <= limit
    taken_ms, least_ms = (
        sum(stage_ms(profile, stage, policy.microbatch_rows, *way)) for way in (taken, best)
    )
    assert taken_ms <= least_ms * (1 + 1e-12)


def check_plan(plan: Plan, situation: Situation, profile: ModelProfile, policy: Policy) -> None:
    """Check the properties that every plan must have."""
    layers = len(profile.layers)
    first_microbatch = 0
    for pipeline in plan.pipelines:
        assert pipeline.first_microbatch == first_microbatch
        assert pipeline.microbatches >= 1
        first_microbatch += pipeline.microbatches
        edges = [stage.first_layer for stage in pipeline.stages] + [layers]
        assert edges[0] == 0
        for stage, end in zip(pipeline.stages, edges[1:], strict=True):
            assert stage.first_layer < stage.end_layer == end
            assert len({device.node for device in stage.devices}) == 1
        mapping = [(s.first_layer, s.end_layer, len(s.devices)) for s in pipeline.stages]
        for number, (shape, stage) in enumerate(zip(mapping, pipeline.stages, strict=True)):
            check_way(profile, policy, shape, len(mapping) - 1 - number, (stage.recompute, stage.within))
    assert first_microbatch * policy.microbatch_rows == policy.global_batch
    used = [(device.node, device.index) for device in plan.devices]
    assert sorted(used) == sorted((n, i) for n in plan.nodes for i in range(policy.devices_per_node))
    assert sorted([*plan.nodes, *plan.idle_nodes]) == sorted(situation.nodes)
    sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
    assert sum(sizes) == len(plan.nodes), "no node in two pipelines"
    wanted = {
        (device, layer)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for device in stage.devices
        for layer in range(stage.first_layer, stage.end_layer)
        if layer not in situation.holdings.get(device, frozenset())
    }
    moved = [(move.target, move.layer) for move in plan.transfers]
    assert len(moved) == len(set(moved)) and set(moved) == wanted
    for move in plan.transfers:
        assert move.source in plan.devices
        assert move.layer in situation.holdings[move.source]
        assert move.size_bytes == profile.layers[move.layer].state_bytes
    sent = [move.size_bytes for move in plan.transfers]
    assert sent == sorted(sent, reverse=True)
    assert plan.estimated_iteration_s == max(p.estimated_s for p in plan.pipelines)
    assert plan.reason.endswith(".") and "\n" not in plan.reason
    check_transition(plan, situation, profile, policy)


def check_transition(plan: Plan, situation: Situation, profile: ModelProfile, policy: Policy) -> None:
    """Check that every device has room for what it holds until the first commit, and that dropped layers leave
    the state as safe as the tolerated failures and one more require.
    """
    limit = profile.device_memory_bytes if policy.device_memory_bytes is None else policy.device_memory_bytes
    if limit is None or not situation.in_memory:
        assert not plan.released_layers
        return
    gone = {each.device: each for each in plan.released_layers}
    assert len(gone) == len(plan.released_layers) and set(gone) <= set(plan.devices)
    keeps: dict[int, set[str]] = {}
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            own = set(range(stage.first_layer, stage.end_layer))
            shape, last = (stage.first_layer, stage.end_layer, len(stage.devices)), len(pipeline.stages) - 1
            needed = stage_bytes(profile, policy, shape, last - number, stage.recompute)
            for device in stage.devices:
                held = set(situation.holdings.get(device, ()))
                parked = set(gone[device].parked) if device in gone else set()
                dropped = set(gone[device].dropped) if device in gone else set()
                assert not parked & dropped and parked | dropped <= held - own
                parallel = sum(profile.layers[layer].state_bytes for layer in held - own - parked - dropped)
                assert not parallel or needed + parallel <= limit
                whole = sum(profile.layers[layer].state_bytes for layer in held - own)
                assert device not in gone or (needed + whole > limit and parked | dropped)
                for layer in held - dropped:
                    keeps.setdefault(layer, set()).add(device.node)
    for device, each in gone.items():
        for layer in each.dropped:
            assert len(keeps[layer] - {device.node}) >= max(policy.tolerate, 1) + 1
            assert (device, layer) not in [(move.source, move.layer) for move in plan.transfers]
