"""GPU–stage mapping compared with all mappings."""

from math import inf
from random import Random
from typing import Literal

import pytest
from msgspec.structs import replace

from planner.mapping import iteration
from planner.mapping.additive import AdditiveMapping
from planner.mapping.mapper import best_templates
from planner.mapping.paper import paper_templates
from planner.stages.costs import StageCosts
from planner.values import LayerProfile, ModelProfile, Policy, SplitTime, Template
from tests.helpers.oracles import best_mapping_ms, fits, layer, mapping_ms, profile_of, random_model


def as_mapping(template: Template) -> list[tuple[int, int, int]]:
    return [(stage.first_layer, stage.end_layer, stage.devices) for stage in template.stages]


def best(profile: ModelProfile, policy: Policy, nodes: int, microbatches: int = 16) -> Template | None:
    return best_templates(StageCosts(profile, policy), {nodes: microbatches}).get(nodes)


def table_3_layer() -> LayerProfile:
    """Return a layer with 1 ms forward, 2 ms backward, and an all-reduce in each direction that grows with the
    devices.
    """
    all_reduce_ms = {2: 0.03125, 4: 0.046875, 8: 0.0546875}
    return LayerProfile(
        forward_ms=1.0,
        backward_ms=2.0,
        parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        activation_bytes=0,
        output_bytes=0,
        split=tuple(
            SplitTime(devices=d, forward_ms=1 / d + extra_ms, backward_ms=2 / d + extra_ms)
            for d, extra_ms in all_reduce_ms.items()
        ),
    )


def test_three_nodes_where_divide_and_conquer_finds_682() -> None:
    profile = profile_of([30, 23, 6, 51, 1])
    template = best(profile, Policy(global_batch=64, microbatch_rows=4, objective="paper"), 3)
    assert template is not None and template.proved_optimal
    assert template.objective_ms == 646
    assert as_mapping(template) == [(0, 2, 1), (2, 3, 1), (3, 5, 1)]


@pytest.mark.parametrize("split", ["any", "aligned"])
@pytest.mark.parametrize(
    ("nodes", "devices", "layers", "optimum_ms"),
    [
        (8, 1, 24, 351.0),
        (8, 8, 24, 56.671875),
        (16, 1, 24, 426.0),
        (24, 1, 24, 357.0),
        (24, 8, 24, 57.640625),
        (8, 4, 32, 131.625),
        (16, 8, 32, 76.53125),
        (16, 4, 64, 266.625),
        (24, 4, 96, 401.625),
        (24, 8, 96, 230.5625),
    ],
)
def test_uniform_cells_of_table_3(
    nodes: int, devices: int, layers: int, optimum_ms: float, split: Literal["any", "aligned"]
) -> None:
    """The optima are known and equal to the last bit; benchmarks/table3.py compares all of Table 3."""
    profile = ModelProfile(layers=(table_3_layer(),) * layers, microbatch_rows=1, stage_devices=(1, 2, 4, 8))
    policy = Policy(
        devices_per_node=devices, global_batch=64, microbatch_rows=1, objective="paper", split=split
    )
    template = best(profile, policy, nodes)
    assert template is not None and template.proved_optimal
    assert template.objective_ms == optimum_ms
    assert mapping_ms(profile, policy, as_mapping(template), 1) == optimum_ms


@pytest.mark.parametrize(("objective", "cases"), [("paper", 300), ("iteration", 150)])
@pytest.mark.long
def test_random_small_models_against_brute_force(objective: str, cases: int) -> None:
    random = Random(objective)
    infeasible = 0
    for _ in range(cases):
        profile, policy, nodes = random_model(random, objective)
        microbatches = random.randint(1, 12)
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
    assert 0.1 * cases < infeasible < 0.6 * cases


@pytest.mark.parametrize("objective", ["paper", "iteration"])
def test_all_sizes_at_once_are_as_good_as_one_by_one(objective: str) -> None:
    random = Random(11)
    for _ in range(60):
        profile, policy, _ = random_model(random, objective)
        costs = StageCosts(profile, policy)
        sizes = range(1, costs.most_nodes + 1)
        together = best_templates(costs, dict.fromkeys(sizes, 7)) if sizes else {}
        alone = {nodes: best_templates(costs, {nodes: 7}).get(nodes) for nodes in sizes}
        assert list(together) == [nodes for nodes, template in alone.items() if template]
        for nodes, template in together.items():
            single = alone[nodes]
            assert single is not None and template.nodes == single.nodes
            assert template.objective_ms == pytest.approx(single.objective_ms, rel=1e-12)


def test_the_search_finds_what_a_scan_of_all_slowest_times_finds() -> None:
    """The models are too large to enumerate all mappings, and memory limits some of them."""
    random, decided = Random(2), 0
    for memory_bytes in (None, *(random.randint(40, 200) for _ in range(12))):
        layers = tuple(
            layer(
                forward_ms=random.choice([1.0, random.random()]),
                state_bytes=4 * random.randint(1, 5),
                activation_bytes=random.randint(1, 9),
            )
            for _ in range(14)
        )
        profile = ModelProfile(layers=layers, microbatch_rows=4, device_memory_bytes=memory_bytes)
        policy = Policy(devices_per_node=3, global_batch=64, microbatch_rows=4, objective="paper")
        costs = StageCosts(profile, policy)
        additive = AdditiveMapping(costs, 3)
        scan = additive.minima([(index, index) for index in range(len(additive.times_ms))], 3)
        free = paper_templates(
            AdditiveMapping(StageCosts(replace(profile, device_memory_bytes=None), policy), 3), [3]
        )
        found = paper_templates(additive, [1, 2, 3])
        for nodes in (1, 2, 3):
            least = min(float(minima[nodes]) for minima in scan)
            assert (nodes in found) == (least < inf)
            if nodes in found:
                assert found[nodes].objective_ms == pytest.approx(least, rel=1e-12)
                assert fits(profile, policy, as_mapping(found[nodes]))
        decided += 3 not in found or found[3].objective_ms > free[3].objective_ms * (1 + 1e-9)
    assert 3 <= decided <= 12


def test_layers_that_take_no_time_can_be_anywhere() -> None:
    profile = profile_of([0.0, 4.0, 0.0, 0.0, 8.0, 0.0])
    policy = Policy(global_batch=64, microbatch_rows=4, objective="paper")
    for nodes in range(1, 7):
        template = best(profile, policy, nodes)
        assert template is not None
        assert template.objective_ms == best_mapping_ms(profile, policy, nodes, 1)
    template = best(profile_of([0.0] * 3), policy, 2)
    assert template is not None and template.objective_ms == 0


def test_devices_that_take_a_million_times_longer_do_not_blur_the_others() -> None:
    """One device is so slow that sums over its times lose the digits in which two devices differ."""
    random = Random(5)
    layers = tuple(
        replace(
            table_3_layer(),
            forward_ms=1e9 * random.random(),
            split=(SplitTime(devices=2, forward_ms=random.random(), backward_ms=random.random()),),
        )
        for _ in range(7)
    )
    profile = ModelProfile(layers=layers, microbatch_rows=1, stage_devices=(1, 2))
    policy = Policy(devices_per_node=2, global_batch=8, microbatch_rows=1, objective="paper")
    for nodes in (2, 3):
        template = best(profile, policy, nodes)
        assert template is not None
        assert template.objective_ms == pytest.approx(best_mapping_ms(profile, policy, nodes, 1), rel=1e-12)


def test_where_mappings_are_too_many_the_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are the same small ones, but are treated as too large to look at every mapping."""
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", 0)
    random, gaps = Random(7), []
    for _ in range(150):
        profile, policy, nodes = random_model(random, "iteration")
        microbatches = random.randint(1, 12)
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
