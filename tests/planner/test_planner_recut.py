"""New cuts for given stages of different speeds, compared with all cuts."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import pytest

from planner.errors import InfeasibleError
from planner.mapping import recut as module
from planner.mapping.recut import recut
from planner.stages.costs import StageCosts
from planner.values import Link, ModelProfile, Policy, Recomputation, StageTemplate
from tests.helpers.oracles import (
    check_way,
    fits,
    layer,
    profile_of,
    quickest_way,
    simulated_makespan_ms,
    stage_ms,
)


def staged(cuts: Sequence[int], devices: Sequence[int], devices_per_node: int) -> tuple[StageTemplate, ...]:
    offsets = [sum(devices[:stage]) // devices_per_node for stage in range(len(devices))]
    return tuple(
        StageTemplate(first_layer=first, end_layer=end, node_offset=offset, devices=d)
        for (first, end), offset, d in zip(pairwise(cuts), offsets, devices, strict=True)
    )


def slowed_ms(
    profile: ModelProfile,
    mapping: Sequence[tuple[int, int, int]],
    slowness: Sequence[float],
    microbatches: int,
    policy: Policy,
) -> float:
    times = []
    for number, stage in enumerate(mapping):
        way = quickest_way(profile, policy, stage, len(mapping) - 1 - number)
        assert way is not None
        times.append(stage_ms(profile, stage, 4, *way))
    links = [
        profile.link.latency_ms + profile.layers[end - 1].output_bytes / profile.link.bytes_per_s * 1e3
        for _, end, _ in mapping[:-1]
    ]
    forward_ms = [there * factor for (there, _), factor in zip(times, slowness, strict=True)]
    backward_ms = [back * factor for (_, back), factor in zip(times, slowness, strict=True)]
    return simulated_makespan_ms(forward_ms, backward_ms, links, microbatches)


def ratios(random: Random, cases: int) -> list[float]:
    """Return the time with the cuts found over the time with the best cuts, for random cases."""
    found: list[float] = []
    while len(found) < cases:
        layers, microbatches = random.randint(3, 9), random.randint(1, 12)
        devices = random.choice([(1, 1), (2,), (1, 1, 1, 1), (2, 1, 1), (1, 1, 2)])
        if layers < len(devices):
            continue
        profile = ModelProfile(
            layers=tuple(
                layer(
                    random.randint(1, 20) / 4,
                    random.randint(1, 40) / 4,
                    4 * random.randint(0, 3),
                    random.choice([1, 5]),
                    1,
                    Recomputation(activation_bytes=2, recompute_ms=random.randint(1, 4) / 4),
                )
                for _ in range(layers)
            ),
            microbatch_rows=4,
            device_memory_bytes=random.choice([None, random.randint(20, 80)]),
            link=Link(latency_ms=random.choice([0.0, 0.5]), bytes_per_s=8e3),
        )
        policy = Policy(
            devices_per_node=2,
            global_batch=4 * microbatches,
            microbatch_rows=4,
            activation_checkpointing=random.choice(["none", "auto"]),
        )
        slowness = [random.choice([1.0, 1.0, 2.0, 1.3, 0.5]) for _ in devices]
        possible = [
            mapping
            for inner in combinations(range(1, layers), len(devices) - 1)
            for mapping in [list(zip([0, *inner], [*inner, layers], devices, strict=True))]
            if fits(profile, policy, mapping)
        ]
        if not possible:
            continue
        given = [0, *(end for _, end, _ in random.choice(possible))]
        stages = recut(StageCosts(profile, policy), staged(given, devices, 2), slowness, microbatches)
        mapping = [(s.first_layer, s.end_layer, s.devices) for s in stages]
        assert [s.node_offset for s in stages] == [s.node_offset for s in staged(given, devices, 2)]
        assert mapping in possible
        for number, (shape, stage) in enumerate(zip(mapping, stages, strict=True)):
            check_way(profile, policy, shape, len(mapping) - 1 - number, (stage.recompute, stage.within))
        best = min(slowed_ms(profile, other, slowness, microbatches, policy) for other in possible)
        found.append(slowed_ms(profile, mapping, slowness, microbatches, policy) / best)
    return found


def test_a_few_cuts_are_all_enumerated() -> None:
    assert max(ratios(Random(1), 200)) < 1 + 1e-9


def test_of_many_cuts_good_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENUMERATED_CUTS", 0)
    found = ratios(Random(2), 200)
    assert sum(ratio < 1 + 1e-9 for ratio in found) > 190
    assert max(found) < 1.1


def test_a_slow_stage_gets_few_layers() -> None:
    costs = StageCosts(profile_of([3.0] * 48), Policy(global_batch=512, microbatch_rows=4))
    given = staged(range(0, 49, 6), [1] * 8, 1)
    stages = recut(costs, given, [1, 1, 1, 2.5, 1, 1, 1, 1], 128)
    lengths = [stage.end_layer - stage.first_layer for stage in stages]
    assert lengths[3] <= 2 and set(lengths[:3] + lengths[4:]) <= {6, 7}


@pytest.mark.parametrize("slowness", [[1.0], [1.0, 0.0], [1.0, -2.0], [1.0, float("nan")]])
def test_slowness_is_a_positive_number_for_each_stage(slowness: list[float]) -> None:
    costs = StageCosts(profile_of([3.0] * 4), Policy(global_batch=64, microbatch_rows=4))
    with pytest.raises(InfeasibleError, match="slowness"):
        recut(costs, staged([0, 2, 4], [1, 1], 1), slowness, 16)
