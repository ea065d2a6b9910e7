"""What the planner is checked against: slow, obvious, and sharing no code with it."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

from planner.values import LayerProfile, Link, ModelProfile, Plan, Policy, Situation

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


def all_mappings(layers: int, nodes: int, devices: int, largest: int) -> Iterator[tuple[Stage, ...]]:
    for splits in product(list(compositions(devices, largest)), repeat=nodes):
        sizes = [size for split in splits for size in split]
        for cuts in combinations(range(1, layers), len(sizes) - 1):
            edges = [0, *cuts, layers]
            yield tuple(zip(edges, edges[1:], sizes, strict=False))


def stage_ms(profile: ModelProfile, stage: Stage, rows: int) -> tuple[float, float]:
    first, end, devices = stage
    share = -(-rows // devices) / rows
    layers = profile.layers[first:end]
    return sum(x.forward_ms for x in layers) * share, sum(x.backward_ms for x in layers) * share


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
    times = [stage_ms(profile, stage, policy.microbatch_rows) for stage in mapping]
    if policy.objective == "paper":
        return paper_ms([there + back for there, back in times])
    links = [
        profile.link.latency_ms + profile.layers[end - 1].output_bytes / profile.link.bytes_per_s * 1e3
        for _, end, _ in mapping[:-1]
    ]
    return simulated_makespan_ms([t for t, _ in times], [t for _, t in times], links, microbatches)


def best_mapping_ms(profile: ModelProfile, policy: Policy, nodes: int, microbatches: int) -> float | None:
    largest = min(policy.devices_per_node, policy.microbatch_rows)
    scores = [
        mapping_ms(profile, policy, mapping, microbatches)
        for mapping in all_mappings(len(profile.layers), nodes, policy.devices_per_node, largest)
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
