"""The quickest mapping for the microbatches that are really run, compared with all mappings."""

from random import Random

import pytest

from planner.mapping import iteration
from planner.mapping.iteration import quickest_template
from planner.mapping.mapper import best_templates
from planner.mapping.quickest import mapping_count
from planner.stages.costs import StageCosts
from planner.values import Link, ModelProfile, Policy, Recomputation, StageTemplate, Template
from tests.helpers.oracles import all_mappings, fits, layer, mapping_ms, profile_of

Mapping = tuple[tuple[int, int, int], ...]


def as_mapping(stages: tuple[StageTemplate, ...]) -> Mapping:
    return tuple((stage.first_layer, stage.end_layer, stage.devices) for stage in stages)


def random_case(random: Random) -> tuple[ModelProfile, Policy, int, int]:
    layers, nodes, devices = random.randint(2, 8), random.randint(1, 4), random.choice([1, 1, 2, 2, 3, 4])
    profile = ModelProfile(
        layers=tuple(
            layer(
                random.choice([1.0, random.randint(1, 20) / 4]),
                random.choice([2.0, random.randint(1, 40) / 4]),
                4 * random.randint(0, 3),
                random.randint(0, 4),
                random.randint(0, 9),
                Recomputation(activation_bytes=random.randint(0, 3), recompute_ms=random.randint(1, 8) / 8),
            )
            for _ in range(layers)
        ),
        microbatch_rows=4,
        device_memory_bytes=random.choice([None, None, random.randint(20, 100)]),
        stage_devices=random.choice([None, (1, 2, 4)]) if devices != 3 else None,
        link=Link(latency_ms=random.choice([0.0, 0.0, 0.5]), bytes_per_s=random.choice([8e3, 1e12])),
    )
    policy = Policy(
        devices_per_node=devices,
        global_batch=4 * random.randint(1, 12),
        microbatch_rows=4,
        split="aligned" if devices != 3 and random.random() < 0.3 else "any",
        activation_checkpointing=random.choice(["none", "none", "selective", "full", "auto", "auto"]),
    )
    return profile, policy, nodes, random.choice([1, 2, 3, 4, 6, 12, 24])


def template_of(profile: ModelProfile, policy: Policy, nodes: int, microbatches: int) -> Template | None:
    return best_templates(StageCosts(profile, policy), {nodes: microbatches}).get(nodes)


def check(random: Random, cases: int) -> tuple[list[float], int]:
    """Return objective over optimum of every feasible case, and how many were proved."""
    ratios, proved = [], 0
    while len(ratios) < cases:
        profile, policy, nodes, microbatches = random_case(random)
        if mapping_count(StageCosts(profile, policy), nodes) > 1_000:
            continue
        scores = {
            mapping: mapping_ms(profile, policy, mapping, microbatches)
            for mapping in all_mappings(profile, policy, nodes)
            if fits(profile, policy, mapping)
        }
        template = template_of(profile, policy, nodes, microbatches)
        assert (template is None) == (not scores)
        if template is None:
            continue
        optimum_ms = min(scores.values())
        assert scores[as_mapping(template.stages)] == pytest.approx(template.objective_ms, rel=1e-12)
        assert template.lower_bound_ms <= optimum_ms * (1 + 1e-12)
        assert template.objective_ms >= optimum_ms * (1 - 1e-12)
        if template.proved_optimal:
            assert template.objective_ms == pytest.approx(optimum_ms, rel=1e-11)
        ratios.append(template.objective_ms / optimum_ms)
        proved += template.proved_optimal
    return ratios, proved


def test_a_few_mappings_are_all_enumerated() -> None:
    ratios, proved = check(Random(1), 60)
    assert max(ratios) < 1 + 1e-11 and proved == 60


@pytest.mark.long
def test_where_mappings_are_too_many_bounds_hold_and_most_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are the same small ones, but are treated as too large to look at every mapping."""
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", 0)
    ratios, proved = check(Random(2), 150)
    assert proved > 145
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) > 147
    assert max(ratios) < 1.02


@pytest.mark.long
def test_without_a_budget_to_prove_the_gap_is_stated_and_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", 0)
    monkeypatch.setattr(iteration, "EXPANSIONS", 0)
    monkeypatch.setattr(iteration, "MOST_ROUNDS", 1)
    ratios, proved = check(Random(3), 60)
    assert proved < 58 and max(ratios) < 1.1


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 24, 128])
@pytest.mark.parametrize("devices", [1, 4])
def test_never_slower_than_the_best_mapping_for_the_paper(microbatches: int, devices: int) -> None:
    random = Random(microbatches)
    profile = profile_of([random.randint(1, 40) / 8 for _ in range(32)], rows=8)
    policies = [
        Policy(devices_per_node=devices, global_batch=1024, microbatch_rows=8, objective=objective)
        for objective in ("paper", "iteration")
    ]
    for nodes in (4, 8):
        paper, quick = (template_of(profile, policy, nodes, microbatches) for policy in policies)
        assert paper is not None and quick is not None
        clock = StageCosts(profile, policies[0]).clock
        assert quick.objective_ms == clock(quick.stages).makespan_ms(microbatches)
        assert quick.objective_ms <= clock(paper.stages).makespan_ms(microbatches)
        assert quick.lower_bound_ms <= quick.objective_ms


def test_a_bad_seed_does_not_matter_where_all_is_proved() -> None:
    profile = profile_of([3.0] * 48)
    costs = StageCosts(profile, Policy(global_batch=512, microbatch_rows=4))
    bad = tuple(
        StageTemplate(first_layer=first, end_layer=end, node_offset=node, devices=1)
        for node, (first, end) in enumerate([*((n, n + 1) for n in range(15)), (15, 48)])
    )
    template = quickest_template(costs, 16, 128, [bad])
    assert template is not None and template.proved_optimal
    assert template.objective_ms == (128 + 16 - 1) * 9


def test_one_microbatch_takes_the_shortest_round_trip() -> None:
    """With one microbatch nothing overlaps: work and links add up, so more devices on a stage are better."""
    profile = profile_of([2.0] * 24)
    template = template_of(profile, Policy(devices_per_node=4, global_batch=4, microbatch_rows=4), 6, 1)
    assert template is not None and template.proved_optimal
    assert template.objective_ms == 12
    assert {stage.devices for stage in template.stages} == {4}
