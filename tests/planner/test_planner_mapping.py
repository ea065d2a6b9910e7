"""GPU–stage mapping against all mappings there are."""

from random import Random

import pytest
from oracles import best_mapping_ms, fits, mapping_ms, profile_of

from planner import iteration
from planner.costs import StageCosts
from planner.mapping import Mapper
from planner.values import LayerProfile, Link, ModelProfile, Policy, Template


def as_mapping(template: Template) -> list[tuple[int, int, int]]:
    return [(stage.first_layer, stage.end_layer, stage.devices) for stage in template.stages]


def best(profile: ModelProfile, policy: Policy, nodes: int, microbatches: int = 16) -> Template | None:
    return Mapper(StageCosts(profile, policy), nodes).template(nodes, microbatches)


def random_case(random: Random, objective: str) -> tuple[ModelProfile, Policy, int, int]:
    layers, nodes, devices = random.randint(1, 7), random.randint(1, 3), random.randint(1, 3)
    some = [
        LayerProfile(
            forward_ms=random.choice([1.0, random.randint(1, 20) / 4]),
            backward_ms=random.choice([2.0, random.randint(1, 40) / 4]),
            parameter_bytes=random.randint(0, 9),
            gradient_bytes=random.randint(0, 9),
            optimizer_bytes=random.randint(0, 9),
            activation_bytes=random.randint(0, 9),
            output_bytes=random.randint(0, 9),
        )
        for _ in range(layers)
    ]
    rows = random.randint(1, 4)
    profile = ModelProfile(
        layers=tuple(some),
        microbatch_rows=rows,
        device_memory_bytes=random.choice([None, random.randint(20, 200)]),
        link=Link(latency_ms=random.choice([0.0, 0.5]), bytes_per_s=8e3),
    )
    policy = Policy(
        devices_per_node=devices,
        global_batch=rows * random.randint(1, 12),
        microbatch_rows=rows,
        objective="paper" if objective == "paper" else "iteration",
    )
    return profile, policy, nodes, random.randint(1, 12)


def test_three_nodes_where_divide_and_conquer_finds_682() -> None:
    profile = profile_of([30, 23, 6, 51, 1])
    template = best(profile, Policy(global_batch=64, microbatch_rows=4, objective="paper"), 3)
    assert template is not None and template.proved_optimal
    assert template.objective_ms == 646
    assert as_mapping(template) == [(0, 2, 1), (2, 3, 1), (3, 5, 1)]


@pytest.mark.parametrize(("nodes", "optimum"), [(8, 351), (16, 426), (24, 357)])
def test_24_equal_layers_of_table_3(nodes: int, optimum: int) -> None:
    profile = profile_of([3.0] * 24)
    template = best(profile, Policy(global_batch=64, microbatch_rows=4, objective="paper"), nodes)
    assert template is not None and (template.objective_ms, template.proved_optimal) == (optimum, True)


@pytest.mark.parametrize("objective", ["paper", "iteration"])
def test_random_small_models_against_brute_force(objective: str) -> None:
    random = Random(objective)
    infeasible = 0
    for _ in range(150):
        profile, policy, nodes, microbatches = random_case(random, objective)
        template = best(profile, policy, nodes, microbatches)
        expected = best_mapping_ms(profile, policy, nodes, microbatches)
        if template is None or expected is None:
            assert template is None and expected is None
            infeasible += 1
            continue
        assert template.proved_optimal
        assert template.objective_ms == pytest.approx(expected, rel=1e-12)
        again = mapping_ms(profile, policy, as_mapping(template), microbatches)
        assert again == pytest.approx(template.objective_ms, rel=1e-12)
        assert fits(profile, policy, as_mapping(template))
    assert 10 < infeasible < 100


def test_where_mappings_are_too_many_the_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same small models, but treated as too large to look at every mapping."""
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", 0)
    random, gaps = Random(7), []
    for _ in range(150):
        profile, policy, nodes, microbatches = random_case(random, "iteration")
        template = best(profile, policy, nodes, microbatches)
        expected = best_mapping_ms(profile, policy, nodes, microbatches)
        assert (template is None) == (expected is None)
        if template is not None and expected is not None:
            assert template.lower_bound_ms <= expected * (1 + 1e-9)
            assert template.objective_ms >= expected * (1 - 1e-9)
            assert fits(profile, policy, as_mapping(template))
            gaps.append(template.objective_ms / expected)
    assert sum(gaps) / len(gaps) < 1.02
    assert sum(gap < 1 + 1e-9 for gap in gaps) > 0.8 * len(gaps)


def test_every_device_of_every_node_is_used_and_stages_stay_in_their_node() -> None:
    template = best(profile_of([1.0] * 9), Policy(devices_per_node=3, global_batch=64, microbatch_rows=4), 3)
    assert template is not None
    per_node = [0, 0, 0]
    for stage in template.stages:
        per_node[stage.node_offset] += stage.devices
    assert per_node == [3, 3, 3]


def test_no_stage_has_more_devices_than_a_microbatch_has_rows() -> None:
    profile = profile_of([1.0] * 6, rows=1)
    template = best(profile, Policy(devices_per_node=2, global_batch=8, microbatch_rows=1), 2)
    assert template is not None
    assert [stage.devices for stage in template.stages] == [1, 1, 1, 1]
