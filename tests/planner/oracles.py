"""What the planner is checked against: slow, obvious, and sharing no code with it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

from planner.values import LayerProfile, Link, ModelProfile, Plan, Policy, Situation, SplitTime

Stage = tuple[int, int, int]
"""(first layer, end layer, devices)."""


def layer(
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    state_bytes: int = 12,
    activation_bytes: int = 4,
    output_bytes: int = 0,
) -> LayerProfile:
    """``state_bytes`` is spread over parameters, gradients and optimizer as 1 : 1 : 2."""
    return LayerProfile(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameter_bytes=state_bytes // 4,
        gradient_bytes=state_bytes // 4,
        optimizer_bytes=state_bytes // 2,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
    )


def profile_of(times_ms: Sequence[float], memory_bytes: int | None = None, rows: int = 4) -> ModelProfile:
    """A model of layers whose forward and backward times add up to ``times_ms``; links are free."""
    return ModelProfile(
        layers=tuple(layer(forward_ms=time / 4, backward_ms=time * 3 / 4) for time in times_ms),
        microbatch_rows=rows,
        device_memory_bytes=memory_bytes,
        link=Link(latency_ms=0.0),
        ring=Link(latency_ms=0.0, bytes_per_s=1e12),
    )


def random_model(random: Random, objective: str = "iteration") -> tuple[ModelProfile, Policy, int]:
    """A small model, a policy, and a number of nodes: small enough to look at every mapping.

    Half of them have times that doubles do not hold exactly, half a memory limit; node splits and measured
    times on several devices are restricted or there or not.
    """
    devices, rows = random.randint(1, 4), random.choice([1, 2, 4, 4])
    exact, measured = random.random() < 0.5, random.random() < 0.5

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
            split=tuple(
                SplitTime(devices=d, forward_ms=time_ms(1 / d), backward_ms=time_ms(2 / d))
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
        checkpoint_activations=random.random() < 0.25,
    )
    return profile, policy, random.randint(1, 3 if devices < 4 else 2)


def operations(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B as everyone draws it."""
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", m) for m in range(ahead)]
    for m in range(ahead, microbatches):
        order += [("F", m), ("B", m - ahead)]
    return order + [("B", m) for m in range(microbatches - ahead, microbatches)]


def simulated_makespan_ms(
    forward_ms: Sequence[float], backward_ms: Sequence[float], link_ms: Sequence[float], microbatches: int
) -> float:
    """Do whatever operation is possible next, until all are done."""
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
    """The ways to split a node's devices into stages that the profile and the policy allow."""
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
    profile: ModelProfile, stage: Stage, rows: int, checkpoint_activations: bool = False
) -> tuple[float, float]:
    """Measured where the profile has it, else by the rows of the fullest device."""
    first, end, devices = stage
    forward_ms = backward_ms = 0.0
    for x in profile.layers[first:end]:
        measured = [split for split in x.split if split.devices == devices]
        if measured:
            there, back = measured[0].forward_ms, measured[0].backward_ms
        else:
            there, back = (time * -(-rows // devices) / rows for time in (x.forward_ms, x.backward_ms))
        forward_ms += there * rows / profile.microbatch_rows
        backward_ms += (back + there * checkpoint_activations) * rows / profile.microbatch_rows
    return forward_ms, backward_ms


def stage_bytes(profile: ModelProfile, policy: Policy, stage: Stage, behind: int) -> int:
    first, end, devices = stage
    layers = profile.layers[first:end]
    alive = min(behind + 1, policy.microbatches)
    state = sum(x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes for x in layers)
    rows = -(-policy.microbatch_rows // devices)
    if policy.checkpoint_activations:
        inputs = sum(profile.layers[i - 1].output_bytes for i in range(first, end) if i)
        kept = inputs * alive + max(x.activation_bytes for x in layers)
    else:
        kept = sum(x.activation_bytes for x in layers) * alive
    return state + -(-kept * rows // profile.microbatch_rows)


def fits(profile: ModelProfile, policy: Policy, mapping: Sequence[Stage]) -> bool:
    limit = policy.device_memory_bytes or profile.device_memory_bytes
    if limit is None:
        return True
    return all(
        stage_bytes(profile, policy, stage, len(mapping) - 1 - number) <= limit
        for number, stage in enumerate(mapping)
    )


def paper_ms(times_ms: Sequence[float]) -> float:
    """T1, T2 and T3 of Eq. 1–4 spelled out, N_b = 4S."""
    stages = len(times_ms)
    k = max(range(stages), key=lambda index: (times_ms[index], index))
    t1 = sum(times_ms)
    t2 = (4 * stages - stages + k - 1) * times_ms[k]
    return t1 + t2 + sum(times_ms[k:])


def mapping_ms(profile: ModelProfile, policy: Policy, mapping: Sequence[Stage], microbatches: int) -> float:
    """The policy's objective."""
    rows, checkpoint = policy.microbatch_rows, policy.checkpoint_activations
    times = [stage_ms(profile, stage, rows, checkpoint) for stage in mapping]
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
    """All ways to add up sizes to ``total``, each largest first."""
    if total == 0:
        yield ()
    for size in sizes:
        if size <= total:
            for rest in multisets(total - size, [s for s in sizes if s <= size]):
                yield (size, *rest)


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to hand out ``total`` microbatches, at least one to each."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = [0, *cuts, total]
        yield tuple(b - a for a, b in pairwise(edges))


def check_plan(plan: Plan, situation: Situation, profile: ModelProfile, policy: Policy) -> None:
    """Everything that must hold of any plan."""
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
        assert fits(profile, policy, mapping)
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
