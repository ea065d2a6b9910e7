"""Stages that recompute their activations, where the planner chooses."""

from itertools import product
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from planner.errors import InfeasibleError
from planner.mapping import iteration
from planner.mapping.mapper import best_templates
from planner.planner import Planner
from planner.stages.costs import StageCosts
from planner.stages.layers import expected_ms
from planner.templates import smallest_pipeline
from planner.values import (
    ActivationCheckpointing,
    ModelProfile,
    Policy,
    Recomputation,
    Recompute,
    Template,
)
from tests.helpers.oracles import (
    all_mappings,
    best_mapping_ms,
    check_way,
    layer,
    pipeline_ms,
    random_model,
    stage_bytes,
    stage_ms,
    ways,
)


def model(layers: int = 8, memory_bytes: int | None = None, selective: bool = True) -> ModelProfile:
    """Return equal layers: 12 bytes of state, 8 of activations, 3 if selected, 1 of inputs."""
    measured = Recomputation(activation_bytes=3, recompute_ms=0.25) if selective else None
    one = layer(activation_bytes=8, output_bytes=1, selective=measured)
    return ModelProfile(layers=(one,) * layers, microbatch_rows=4, device_memory_bytes=memory_bytes)


def policy_of(checkpointing: ActivationCheckpointing, **changes: object) -> Policy:
    settings: dict[str, object] = {"global_batch": 64, "microbatch_rows": 4, "tolerate": 0, **changes}
    return Policy(activation_checkpointing=checkpointing, **settings)  # type: ignore[arg-type]


def best(profile: ModelProfile, policy: Policy, nodes: int, microbatches: int = 16) -> Template:
    template = best_templates(StageCosts(profile, policy), {nodes: microbatches}).get(nodes)
    assert template is not None
    return template


def ways_of(template: Template) -> list[Recompute]:
    return [stage.recompute for stage in template.stages]


@pytest.mark.parametrize("objective", ["paper", "iteration"])
def test_stages_recompute_only_where_memory_requires_it(objective: str) -> None:
    """Stage s of 4 has 4 − s microbatches in flight: the first stages lack memory, the last one does not."""
    auto = policy_of("auto", objective=objective)
    assert ways_of(best(model(memory_bytes=400), auto, 4)) == ["none"] * 4
    assert ways_of(best(model(memory_bytes=70), auto, 4)) == ["selective", "selective", "none", "none"]
    assert ways_of(best(model(memory_bytes=50), auto, 4)) == ["full", "selective", "selective", "none"]
    unmeasured = model(memory_bytes=50, selective=False)
    assert ways_of(best(unmeasured, auto, 4)) == ["full", "full", "full", "none"]


def test_recomputing_some_stages_is_quicker_than_all_and_needs_fewer_nodes_than_none() -> None:
    profile = model(memory_bytes=70)
    n0 = {
        checkpointing: smallest_pipeline(StageCosts(profile, policy_of(checkpointing)))
        for checkpointing in ("none", "selective", "full", "auto")
    }
    assert n0["auto"] == n0["full"] < n0["none"]
    step_ms = {
        checkpointing: best(profile, policy_of(checkpointing), 4).objective_ms
        for checkpointing in ("selective", "full", "auto")
    }
    assert step_ms["auto"] <= step_ms["selective"] < step_ms["full"]
    free = best(model(memory_bytes=400), policy_of("auto"), 4)
    assert free.objective_ms == best(model(memory_bytes=400), policy_of("none"), 4).objective_ms


@pytest.mark.long
def test_no_other_choice_for_any_stage_is_better() -> None:
    """Compare with every mapping under every combination of ways to recompute that fits."""
    random, recomputing = Random(4), 0
    for _ in range(100):
        profile, policy, nodes = random_model(random)
        policy = msgspec.structs.replace(policy, activation_checkpointing="auto", within_node="replicate")
        profile = replace(profile, layers=profile.layers[:5], device_memory_bytes=random.randint(20, 60))
        scores: list[float] = []
        for mapping in all_mappings(profile, policy, nodes):
            fitting = [
                [
                    stage_ms(profile, stage, policy.microbatch_rows, *way)
                    for way in ways(profile, policy, stage[2])
                    if stage_bytes(profile, policy, stage, len(mapping) - 1 - number, *way)
                    <= (profile.device_memory_bytes or 0)
                ]
                for number, stage in enumerate(mapping)
            ]
            scores += [pipeline_ms(profile, policy, mapping, times, 6) for times in product(*fitting)]
        template = best_templates(StageCosts(profile, policy), {nodes: 6}).get(nodes)
        assert (template is None) == (not scores)
        if template is None:
            continue
        assert template.objective_ms == pytest.approx(min(scores), rel=1e-12)
        recomputing += set(ways_of(template)) != {"none"}
    assert recomputing >= 4


@pytest.mark.parametrize("objective", ["paper", "iteration"])
@pytest.mark.long
def test_the_search_is_exact_where_recomputation_decides(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is tight, and mappings are treated as too many to enumerate."""
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", 0)
    random, mixed, proved = Random(objective), 0, 0
    cases = 120
    for _ in range(cases):
        profile, policy, nodes = random_model(random, objective)
        policy = msgspec.structs.replace(policy, activation_checkpointing="auto")
        profile = replace(profile, device_memory_bytes=random.randint(20, 60))
        microbatches = random.randint(1, 12)
        template = best_templates(StageCosts(profile, policy), {nodes: microbatches}).get(nodes)
        expected = best_mapping_ms(profile, policy, nodes, microbatches)
        assert (template is None) == (expected is None)
        if template is None or expected is None:
            continue
        assert template.lower_bound_ms <= expected * (1 + 1e-12)
        assert template.objective_ms >= expected * (1 - 1e-12)
        if template.proved_optimal:
            assert template.objective_ms == pytest.approx(expected, rel=1e-11)
        for number, stage in enumerate(template.stages):
            shape = stage.first_layer, stage.end_layer, stage.devices
            way = stage.recompute, stage.within
            check_way(profile, policy, shape, len(template.stages) - 1 - number, way)
        mixed += len(set(ways_of(template))) > 1
        proved += template.proved_optimal
    assert mixed >= 5 and proved >= 40


def test_a_plan_says_what_each_stage_does_and_expects_its_time() -> None:
    planner = Planner(model(memory_bytes=50), policy_of("auto"))
    plan = planner.plan(planner.initial_situation([f"n{number}" for number in range(planner.n0)]))
    (pipeline,) = plan.pipelines
    assert len({stage.recompute for stage in pipeline.stages}) > 1
    expected = expected_ms(planner.profile, planner.policy, plan.pipelines)
    for stage in pipeline.stages:
        again_ms = {"none": 0.0, "selective": 0.25, "full": 1.0}[stage.recompute]
        count = stage.end_layer - stage.first_layer
        assert expected[stage.devices[0]] == pytest.approx(count * (3 + again_ms))


def test_a_slow_node_gets_fewer_layers_and_may_stop_recomputing() -> None:
    planner = Planner(model(layers=16, memory_bytes=200), policy_of("auto", global_batch=256))
    fresh = planner.initial_situation(["a", "b"])
    before = planner.plan(fresh)
    slow = before.pipelines[0].stages[0].devices[0].node
    after = planner.plan(replace(fresh, previous=before, speeds={slow: 0.3}, horizon_s=1e6))
    layers = [stage.end_layer - stage.first_layer for stage in after.pipelines[0].stages]
    assert layers[0] < layers[1]
    for number, stage in enumerate(after.pipelines[0].stages):
        shape = stage.first_layer, stage.end_layer, 1
        way = stage.recompute, stage.within
        check_way(planner.profile, planner.policy, shape, 1 - number, way)


def test_a_model_that_would_fit_with_recomputation_says_so() -> None:
    # A layer takes 12 bytes, and 8 more for each microbatch in flight or, fully recomputed, for one in all.
    with pytest.raises(
        InfeasibleError,
        match=r" activations of 2 microbatches in flight .*\) .* or activation_checkpointing = auto, which fits on 2 ",
    ):
        Planner(model(layers=2, memory_bytes=22), policy_of("none"))
    with pytest.raises(
        InfeasibleError, match="start 5 nodes or more, or use activation_checkpointing = auto"
    ):
        Planner(model(memory_bytes=60), policy_of("none")).precompute(3)
    with pytest.raises(InfeasibleError, match=r"layers' inputs of 7 microbatches .* or smaller layers"):
        Planner(model(memory_bytes=13), policy_of("auto"))
